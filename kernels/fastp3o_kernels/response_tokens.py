"""A padded batch -> the tokens of responses, which losses take without padding."""

from typing import NamedTuple

import torch
from torch import Tensor

from fastp3o_kernels.checks import (
    check_positive_whole_number,
    check_same_device,
    check_shape,
    check_tensors,
    first_index,
    may_look_at_values,
)
from fastp3o_kernels.operation import graph_break


class ResponseTokens(NamedTuple):
    """N tokens of B responses.

    predicted_at: [N] int64, each token's row of hidden.flatten(0, 1), for hidden states [B, T, D]:
        that of the position before it.
    labels: [N] int64, the tokens. cu_seqlens: [B + 1] int64 on the CPU, where each response begins.
    """

    predicted_at: Tensor
    labels: Tensor
    cu_seqlens: Tensor

    def select(self, values: Tensor) -> Tensor:
        """A batch's values of tokens [B, T], such as old log-probs -> [N], in the order of the
        labels.
        """
        return values.flatten()[self.predicted_at + 1]


@graph_break
def response_tokens(
    input_ids: Tensor, response_mask: Tensor, *, responses_per_prompt: int = 1
) -> ResponseTokens:
    """The tokens of responses in a batch [B, T], padded on either side, as losses take them. The
    host waits once for their number.

        tokens = response_tokens(input_ids, response_mask, responses_per_prompt=2)
        hidden = model.base_model(input_ids, attention_mask=attention_mask).last_hidden_state.flatten(0, 1)
        linear_p3o_loss(hidden[tokens.predicted_at], head, tokens.labels, tokens.cu_seqlens, ...)

    Args:
        input_ids: [B, T] int64.
        response_mask: [B, T], bool or of zeros and ones: 1 at the responses' own tokens,
            end-of-sequence included; 0 at prompts, padding and output of tools. It is not shifted.
        responses_per_prompt: K. Losses take the K responses to a prompt one after the other. Where
            all first responses come before all second ones, torch.arange(B).view(K, P).T.flatten()
            orders the batch.

    Raises:
        ValueError: for shapes that disagree; a mask with other values than 0 and 1, or with a
            response's token in the first position, which nothing predicts; K neighbors whose
            prompts differ. Values on a GPU are looked at only with FASTP3O_DEBUG=1.
    """
    check_tensors(input_ids=input_ids, response_mask=response_mask)
    check_positive_whole_number("responses_per_prompt", responses_per_prompt)
    if input_ids.dim() != 2:
        raise ValueError(f"input_ids must have shape [B, T], got {list(input_ids.shape)}")
    check_shape("response_mask", response_mask, tuple(input_ids.shape), "as input_ids")
    check_same_device(input_ids=input_ids, response_mask=response_mask)
    B, K = len(input_ids), responses_per_prompt
    if B % K:
        raise ValueError(
            f"the batch has {B} responses, which is no multiple of the {K} to each prompt"
        )
    mask = response_mask.bool()
    if may_look_at_values(mask):
        check_values(input_ids, response_mask, mask, K)
    # The one wait for a GPU: the number of tokens is known on the host with it.
    cu_seqlens = torch.nn.functional.pad(mask.sum(1).cumsum(0), (1, 0)).cpu()
    places = torch.nonzero_static(mask.flatten(), size=int(cu_seqlens[-1])).squeeze(1)
    return ResponseTokens(places - 1, input_ids.flatten()[places], cu_seqlens)


def check_values(input_ids: Tensor, response_mask: Tensor, mask: Tensor, K: int) -> None:
    if (wrong := response_mask != mask).any():
        row, position = first_index(wrong)
        value = response_mask[row, position].item()
        raise ValueError(
            f"response_mask must be of zeros and ones, and response_mask[{row}, {position}] is {value}"
        )
    if input_ids.shape[1] and mask[:, 0].any():
        (row,) = first_index(mask[:, 0])
        raise ValueError(
            f"response_mask[{row}, 0] is 1: no hidden state predicts the first token of a row. The mask belongs to the "
            "tokens themselves, not shifted"
        )
    for first in range(0, len(mask), K):
        check_same_prompts(input_ids, mask, range(first, first + K))


def check_same_prompts(input_ids: Tensor, mask: Tensor, rows: range) -> None:
    """Checks that the same tokens come before all responses to a prompt; rows without a response do
    not count.
    """
    prompts = {row: input_ids[row, : first_index(mask[row])[0]] for row in rows if mask[row].any()}
    filled = list(prompts)
    for row in filled[1:]:
        short, long = sorted((prompts[row], prompts[filled[0]]), key=len)
        # Of rows that end where they are wide.
        padding, prompt = long.split([len(long) - len(short), len(short)])
        if not torch.equal(short, prompt) or (padding != padding[:1]).any():
            raise ValueError(
                f"rows {filled[0]} and {row} of the batch are taken for responses to one prompt, but other tokens come "
                "before their responses: put the responses to a prompt next to each other"
            )
