"""Values of packed rows as tables [P, K], in the order in which the groups were packed."""

from collections.abc import Sequence

import torch
from torch import Tensor

from fastp3o.errors import UserError
from fastp3o.packing.packed_row import PackedRow, to_device
from fastp3o_kernels import sequence_logprobs


def by_group(rows: Sequence[PackedRow], values: Sequence[Tensor]) -> Tensor:
    """Values of the rows' responses, [S] each -> [P, K], in the order in which the groups were
    given to `pack`; vectors [S, n] -> [P, K, n]. Raises ValueError if groups differ in their number
    of responses.
    """
    responses_per_prompt = rows[0].responses_per_prompt
    if responses_per_prompt is None or any(
        row.responses_per_prompt != responses_per_prompt for row in rows
    ):
        raise UserError("groups with different numbers of responses have no common shape [P, K]")
    order = torch.tensor([group for row in rows for group in row.groups])
    of_groups = torch.cat(list(values)).unflatten(0, (-1, responses_per_prompt))
    return of_groups[to_device(order.argsort(), values[0].device)]


def sums_by_group(rows: Sequence[PackedRow], values: Sequence[Tensor]) -> Tensor:
    """`by_group` of sums over the tokens of each response. values: of the rows' labeled tokens, [N]
    each.
    """
    return by_group(
        rows,
        [
            sequence_logprobs(logprobs, row.cu_seqlens)
            for row, logprobs in zip(rows, values, strict=True)
        ],
    )
