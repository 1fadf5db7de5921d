"""The border: what the operations accept. Every message names the argument, the index and what was expected.

N tokens, V vocabulary, S sequences, P prompts with K responses (S = P K).

Shapes and dtypes are always checked. Values are checked on the CPU, and on a GPU, where looking at them would make the
host wait, only with FASTP3O_DEBUG=1 in the environment.
"""

import os
from itertools import pairwise

import torch
from torch import Tensor

CLIPPING = ("joint", "separate", "none", "token")
KL_REWARD = ("current", "rollout")


def look_at_values(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" or os.environ.get("FASTP3O_DEBUG") == "1"


def first(mask: Tensor) -> tuple[int, ...]:
    return tuple(mask.nonzero()[0].tolist())


def index(position: tuple[int, ...]) -> str:
    return "[" + ", ".join(map(str, position)) + "]"


def check_shape(name: str, tensor: Tensor, shape: tuple[int, ...], why: str) -> None:
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name} must have shape {list(shape)} ({why}), got {list(tensor.shape)}")


def check_floating(name: str, tensor: Tensor) -> None:
    if not tensor.is_floating_point():
        raise ValueError(f"{name} must be of a floating dtype, got {tensor.dtype}")


def check_same_device(**tensors: Tensor | None) -> None:
    devices = {name: tensor.device for name, tensor in tensors.items() if tensor is not None}
    (first_name, device), *others = devices.items()
    for name, other in others:
        if other != device:
            raise ValueError(f"{name} is on {other} and {first_name} on {device}; they must be on one device")


def check_logits(logits: Tensor, labels: Tensor, temperature: float, ignore_index: int | None) -> None:
    if logits.dim() != 2:
        raise ValueError(f"logits must have shape [N, V], got {list(logits.shape)}")
    check_floating("logits", logits)
    check_same_device(logits=logits, labels=labels)
    check_labels(labels, len(logits), logits.shape[1], ignore_index, "one label for each row of logits")
    check_temperature(temperature)


def check_head(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None,
    temperature: float,
    softcap: float | None,
    ignore_index: int | None,
) -> None:
    for name, tensor, shape in (("hidden", hidden, "[N, D]"), ("weight", weight, "[V, D]")):
        if tensor.dim() != 2:
            raise ValueError(f"{name} must have shape {shape}, got {list(tensor.shape)}")
        check_floating(name, tensor)
    if hidden.shape[1] != weight.shape[1]:
        raise ValueError(
            f"hidden [N, D] and weight [V, D] must share D, got {list(hidden.shape)} and {list(weight.shape)}"
        )
    # Autocast brings both to its own dtype, except fp64.
    autocast = torch.is_autocast_enabled(hidden.device.type) and torch.float64 not in (hidden.dtype, weight.dtype)
    if hidden.dtype != weight.dtype and not autocast:
        raise ValueError(f"hidden is {hidden.dtype} and weight {weight.dtype}; they must be of one dtype")
    if bias is not None:
        check_shape("bias", bias, (len(weight),), "one entry for each row of weight")
        check_floating("bias", bias)
    check_same_device(hidden=hidden, weight=weight, labels=labels, bias=bias)
    check_labels(labels, len(hidden), len(weight), ignore_index, "one label for each row of hidden")
    check_temperature(temperature)
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap must be above 0, or None for no cap, got {softcap}")


def check_temperature(temperature: float) -> None:
    if not temperature > 0:
        raise ValueError(f"temperature must be above 0, got {temperature}")


def check_labels(labels: Tensor, N: int, V: int, ignore_index: int | None, why: str) -> None:
    check_shape("labels", labels, (N,), why)
    if labels.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"labels must be int64 or int32, got {labels.dtype}")
    if look_at_values(labels):
        wrong = (labels < 0) | (labels >= V)
        if ignore_index is not None:
            wrong &= labels != ignore_index
        if wrong.any():
            (row,) = first(wrong)
            ignored = "" if ignore_index is None else f" or ignore_index ({ignore_index})"
            raise ValueError(f"labels[{row}] = {int(labels[row])} must be from 0 to {V - 1}{ignored}")


def check_cu_seqlens(cu_seqlens: Tensor, tokens: int, *, responses_per_prompt: int = 1) -> None:
    if cu_seqlens.dim() != 1 or len(cu_seqlens) < 2:
        raise ValueError(f"cu_seqlens must have shape [S + 1] with at least one sequence, got {list(cu_seqlens.shape)}")
    if cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"cu_seqlens must be int32 or int64, got {cu_seqlens.dtype}")
    if (len(cu_seqlens) - 1) % responses_per_prompt:
        raise ValueError(
            f"cu_seqlens has {len(cu_seqlens)} entries, so {len(cu_seqlens) - 1} sequences; with "
            f"{responses_per_prompt} responses to each prompt their number must be a multiple of it"
        )
    if look_at_values(cu_seqlens):
        offsets = cu_seqlens.tolist()
        if offsets[0] != 0:
            raise ValueError(f"cu_seqlens[0] must be 0, got {offsets[0]}")
        for i, (begin, end) in enumerate(pairwise(offsets)):
            if end <= begin:
                kind = "empty" if end == begin else "of negative length"
                raise ValueError(
                    f"cu_seqlens[{i + 1}] = {end} must exceed cu_seqlens[{i}] = {begin}: sequence {i} is {kind}"
                )
        if offsets[-1] != tokens:
            raise ValueError(f"cu_seqlens[{len(offsets) - 1}] = {offsets[-1]} must be the number of tokens, {tokens}")


def check_responses(old_logprobs: Tensor) -> int:
    """Returns K, the number of responses to a prompt."""
    if old_logprobs.dim() != 2 or old_logprobs.shape[1] < 2:
        raise ValueError(
            "old_logprobs must have shape [P, K], with K of 2 or more for the responses to a prompt, got "
            f"{list(old_logprobs.shape)}"
        )
    return old_logprobs.shape[1]


def check_pairs(prompts: int, responses: int, old_logprobs: Tensor, ref_logprobs: Tensor, rewards: Tensor) -> None:
    for name, tensor in (("old_logprobs", old_logprobs), ("ref_logprobs", ref_logprobs), ("rewards", rewards)):
        check_shape(name, tensor, (prompts, responses), "a row for each prompt")
        check_floating(name, tensor)
        if look_at_values(tensor) and (bad := tensor.isnan()).any():
            position = first(bad)
            raise ValueError(f"{name}{index(position)} is NaN: response {position[1] + 1} of prompt {position[0]}")


def check_objective(clipping: str, clip_range: float, ratio_cap: float, kl_coef: float, kl_reward: str) -> None:
    for name, value, allowed in (("clipping", clipping, CLIPPING), ("kl_reward", kl_reward, KL_REWARD)):
        if value not in allowed:
            raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {value!r}")
    if not clip_range > 0:
        raise ValueError(f"clip_range must be above 0, got {clip_range}")
    if not ratio_cap >= 1:
        raise ValueError(f"ratio_cap must be at least 1, got {ratio_cap}")
    if not kl_coef >= 0:
        raise ValueError(f"kl_coef must be 0 or more, got {kl_coef}")


def check_old_token_logprobs(clipping: str, old_token_logprobs: Tensor | None, tokens: int) -> None:
    if clipping != "token":
        if old_token_logprobs is not None:
            raise ValueError(f'old_token_logprobs is for clipping="token" only, and clipping is "{clipping}"')
        return
    if old_token_logprobs is None:
        raise ValueError('clipping="token" needs old_token_logprobs, the old log-probability of each token')
    check_shape("old_token_logprobs", old_token_logprobs, (tokens,), "one for each token")
    check_floating("old_token_logprobs", old_token_logprobs)
