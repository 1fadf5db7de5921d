"""Input validation that operations share. Every message names the argument, the index and the
expected value.

N tokens, V vocabulary, S sequences.

Shapes and dtypes are always checked. Values are checked on the CPU. On a GPU the host would have to
wait for them, so they are checked there only with FASTP3O_DEBUG=1 in the environment.
"""

import os
from collections.abc import Sequence
from itertools import pairwise
from numbers import Integral, Real

import torch
from torch import Tensor


def may_look_at_values(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" or debugging()


def debugging() -> bool:
    return os.environ.get("FASTP3O_DEBUG") == "1"


def first_index(mask: Tensor) -> list[int]:
    return mask.nonzero()[0].tolist()


def check_tensors(**values: object) -> None:
    """Raises ValueError for an argument that is neither a tensor nor None, such as a list."""
    for name, value in values.items():
        if value is not None and not isinstance(value, Tensor):
            raise ValueError(f"{name} must be a tensor, got {type(value).__name__}")


def check_shape(name: str, tensor: Tensor, shape: tuple[int, ...], why: str) -> None:
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name} must have shape {list(shape)} ({why}), got {list(tensor.shape)}")


def checked_number(name: str, value: object) -> float:
    """The number as Python's float: Triton's launcher takes no numpy number, and compiles a variant
    for an int. Raises ValueError for text, a bool, and a tensor, which Triton's kernels would take
    for an address.
    """
    if not isinstance(value, Real) or isinstance(value, bool):
        raise ValueError(f"{name} must be a number, got {value!r}")
    return float(value)


def check_positive_whole_number(name: str, value: object) -> None:
    if not isinstance(value, Integral) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} must be a whole number, 1 or more, got {value!r}")


def check_floating(name: str, tensor: Tensor) -> None:
    """Raises ValueError for whole numbers, and for the floats of 8 bits, with which torch does not
    compute.
    """
    if not tensor.is_floating_point():
        raise ValueError(f"{name} must be of a floating dtype, got {tensor.dtype}")
    if tensor.itemsize == 1:
        raise ValueError(
            f"{name} must be of a floating dtype of 16 bits or more, got {tensor.dtype}"
        )


def check_whole(name: str, tensor: Tensor) -> None:
    """Raises ValueError for a tensor that is spread over processes."""
    spread = getattr(torch.distributed, "tensor", None)  # absent until somebody imports it
    if spread is not None and isinstance(tensor, spread.DTensor):
        raise ValueError(
            f"{name} is a DTensor, spread over processes. With FSDP2, compute the loss within the model's forward "
            "call, where it is whole (`expose_head` does so for models of transformers); where fully_shard has put the "
            "head in a group of its own, pass the layer itself instead of its weight, or call the layer's unshard() "
            "before. Only where all processes have the same tokens (tensor parallelism): Head(weight.to_local(), "
            "shard=VocabularyShard.of(weight)). full_tensor() without grad_placements would give it a wrong gradient"
        )


def check_same_device(**tensors: Tensor | None) -> None:
    devices = {name: tensor.device for name, tensor in tensors.items() if tensor is not None}
    (first_name, device), *others = devices.items()
    for name, other in others:
        if other != device:
            raise ValueError(
                f"{name} is on {other} and {first_name} on {device}; they must be on one device"
            )


def check_labels(labels: Tensor, N: int, V: int, ignore_index: int | None, why: str) -> None:
    check_shape("labels", labels, (N,), why)
    if labels.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"labels must be int64 or int32, got {labels.dtype}")
    if may_look_at_values(labels):
        wrong = (labels < 0) | (labels >= V)
        if ignore_index is not None:
            wrong &= labels != ignore_index
        if wrong.any():
            (i,) = first_index(wrong)
            ignored = "" if ignore_index is None else f" or ignore_index ({ignore_index})"
            remedy = ""
            if ignore_index is None and labels[i] < 0:  # −100 of a padded batch, most likely
                remedy = ". This loss has no tokens to ignore: drop these tokens first: `response_tokens` does"
            raise ValueError(
                f"labels[{i}] = {int(labels[i])} must be from 0 to {V - 1}{ignored}{remedy}"
            )


def check_logprobs_out(logprobs_out: Tensor | None, hidden: Tensor) -> None:
    """Raises ValueError unless the log-probs of hidden's [N, D] tokens fit into it: [N] fp32 or
    fp64, on its device.
    """
    if logprobs_out is None:
        return
    check_shape("logprobs_out", logprobs_out, (len(hidden),), "a log-prob for each token")
    if logprobs_out.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"logprobs_out must be fp32 or fp64, got {logprobs_out.dtype}")
    check_same_device(hidden=hidden, logprobs_out=logprobs_out)


def checked_cu_seqlens(
    cu_seqlens: Tensor | Sequence[int], rows: Tensor, *, responses_per_prompt: int = 1
) -> Tensor:
    """The offsets as a tensor. Sequences may be empty, and there may be none. rows: one for each
    token.
    """
    cu_seqlens, tokens = torch.as_tensor(cu_seqlens), len(rows)
    if cu_seqlens.dim() != 1 or len(cu_seqlens) == 0:
        raise ValueError(f"cu_seqlens must have shape [S + 1], got {list(cu_seqlens.shape)}")
    if cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"cu_seqlens must be int32 or int64, got {cu_seqlens.dtype}")
    if may_look_at_values(cu_seqlens):
        # Before the number of sequences, which is another one where lengths are in their place.
        check_offsets(cu_seqlens.tolist(), tokens)
    if (len(cu_seqlens) - 1) % responses_per_prompt:
        raise ValueError(
            f"cu_seqlens has {len(cu_seqlens)} entries, so {len(cu_seqlens) - 1} sequences; with "
            f"{responses_per_prompt} responses to each prompt their number must be a multiple of it"
        )
    return cu_seqlens


def bounds_of_prompts(cu_seqlens: Tensor, tokens: int, responses_per_prompt: int) -> list[int]:
    """Offsets at which prompts begin and the last one ends, [P + 1], on the host, which waits for a
    GPU. They are checked on any device: memory of tokens that no chunk covers would stay
    uninitialized.
    """
    bounds = cu_seqlens[::responses_per_prompt].tolist()
    check_offsets(bounds, tokens, responses_per_prompt)
    return bounds


def check_offsets(offsets: list[int], tokens: int, step: int = 1) -> None:
    """step: the offsets are every step-th entry of cu_seqlens."""
    if offsets[0] != 0 or offsets[-1] != tokens:
        raise ValueError(
            f"cu_seqlens must begin with 0 and end with the number of tokens ({tokens}), got "
            f"{offsets[0]} and {offsets[-1]}: for lengths give [0, *lengths.cumsum(0)]"
        )
    for i, (begin, end) in enumerate(pairwise(offsets)):
        if end < begin:
            raise ValueError(
                f"cu_seqlens[{(i + 1) * step}] = {end} must not be below cu_seqlens[{i * step}] = {begin}: no sequence "
                "is of negative length"
            )


def check_sum(what: str, together: Tensor, alone: Tensor) -> None:
    """Raises ValueError for an objective's value of some groups that is not the sum of those of
    their two parts, [2], but for rounding, or is NaN.
    """
    together, alone = together.double(), alone.double()
    if not (together - alone.sum()).abs() <= 1e-3 * alone.abs().sum() + 1e-4:
        raise ValueError(
            f"{what} must be a sum over its groups, since each call has any number of them: of two "
            f"parts together it is {together:.6g}, and alone they have {alone[0]:.6g} and "
            f"{alone[1]:.6g}. End in .sum(), not in .mean(), and compare within a group alone"
        )


def check_divisor(divisor: float | Tensor) -> None:
    if isinstance(divisor, Tensor):
        check_shape("divisor", divisor, (), "one number")
    else:
        checked_number("divisor", divisor)
    if not (isinstance(divisor, Tensor) and not may_look_at_values(divisor)) and not divisor > 0:
        raise ValueError(f"divisor must be above 0, got {float(divisor)}")
