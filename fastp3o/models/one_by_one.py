"""Attention one segment after the other, and the keys of shared prompts, in plain torch.

Both are also operations of tensors alone, into which a compiler does not look: what they do depends on the lengths of a
row's segments, which differ in every row.

T tokens (queries), U keys, H heads (Hkv of keys), D size of a head, G segments.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fastp3o.packing.packed_row import Segments, SharedKeys

# --- segments for a compiler ----------------------------------------------------------------------------------------


class FlatKeys(NamedTuple):
    """SharedKeys in tensors that have at least two elements each: compilers take one element for a case of its own."""

    tokens: Tensor  # [U] int64
    own: Tensor  # [T] int64
    repeats: Tensor  # [2 M] int64: all tokens, then all keys
    bounds: Tensor  # [R + 1] int64 on the host: where each further response begins in [M]


class FlatSegments(NamedTuple):
    """Segments in tensors and numbers, which a compiled layer takes for any row."""

    cu_queries: Tensor  # [G + 1] int32
    cu_keys: Tensor  # [G + 1] int32
    lengths: Tensor  # [2 G] int64 on the host: of queries, then of keys
    longest_query: int
    longest_keys: int
    shared: FlatKeys | None


def flat(segments: Segments) -> FlatSegments:
    lengths = torch.tensor([*segments.query_lengths, *segments.key_lengths])
    longest = segments.longest_query, segments.longest_keys
    shared = None if segments.shared is None else flat_keys(segments.shared)
    return FlatSegments(segments.cu_queries, segments.cu_keys, lengths, *longest, shared)


def flat_keys(shared: SharedKeys) -> FlatKeys:
    tokens, keys = zip(*shared.repeats, strict=True)
    bounds = torch.tensor([0, *map(len, tokens)]).cumsum(0)
    return FlatKeys(shared.tokens, shared.own, torch.cat([*tokens, *keys]), bounds)


# --- keys of shared prompts -----------------------------------------------------------------------------------------


class GatherKeys(torch.autograd.Function):
    """Gathers the keys of all segments from those of the tokens. Gradients are added in a fixed order."""

    @staticmethod
    def forward(ctx, tokens, shared):
        ctx.shared = shared
        return tokens[shared.tokens]

    @staticmethod
    def backward(ctx, grad_keys):
        return added_gradients(grad_keys, ctx.shared.own, ctx.shared.repeats), None


def gather_keys(tokens: Tensor, shared: SharedKeys | FlatKeys) -> Tensor:
    """[T, Hkv, D] -> [U, Hkv, D]."""
    return gather_flat_keys(tokens, *shared) if isinstance(shared, FlatKeys) else GatherKeys.apply(tokens, shared)


def added_gradients(grad_keys: Tensor, own: Tensor, repeats: Iterable[tuple[Tensor, Tensor]]) -> Tensor:
    """[U, Hkv, D] -> [T, Hkv, D]."""
    grad = grad_keys[own]
    for tokens, keys in repeats:
        grad.index_add_(0, tokens, grad_keys[keys])
    return grad


@torch.library.custom_op("fastp3o::gather_keys", mutates_args=())
def gather_flat_keys(keys: Tensor, tokens: Tensor, own: Tensor, repeats: Tensor, bounds: Tensor) -> Tensor:
    return keys[tokens]


@gather_flat_keys.register_fake
def _(keys: Tensor, tokens: Tensor, own: Tensor, repeats: Tensor, bounds: Tensor) -> Tensor:
    return keys.new_empty(tokens.shape[0], *keys.shape[1:])


@torch.library.custom_op("fastp3o::gather_keys_backward", mutates_args=())
def flat_gradients(grad_keys: Tensor, own: Tensor, repeats: Tensor, bounds: Tensor) -> Tensor:
    ends = bounds[1:-1].tolist()
    tokens, keys = (half.tensor_split(ends) for half in repeats.chunk(2))
    return added_gradients(grad_keys, own, zip(tokens, keys, strict=True))


@flat_gradients.register_fake
def _(grad_keys: Tensor, own: Tensor, repeats: Tensor, bounds: Tensor) -> Tensor:
    return grad_keys.new_empty(own.shape[0], *grad_keys.shape[1:])


def keep_index(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs[2:])


def flat_keys_backward(ctx, grad_keys):
    return flat_gradients(grad_keys, *ctx.saved_tensors), None, None, None, None


gather_flat_keys.register_autograd(flat_keys_backward, setup_context=keep_index)

# --- attention ------------------------------------------------------------------------------------------------------


def one_by_one(query, key, value, segments: Segments | FlatSegments, scale, window, softcap):
    if isinstance(segments, FlatSegments):
        return attend_flat(query, key, value, segments.lengths, scale, window, softcap)
    return attend_pieces(query, key, value, segments.query_lengths, segments.key_lengths, scale, window, softcap)


@torch.library.custom_op("fastp3o::attend_one_by_one", mutates_args=())
def attend_flat(
    query: Tensor, key: Tensor, value: Tensor, lengths: Tensor, scale: float, window: int | None, softcap: float | None
) -> Tensor:
    queries, keys = lengths.view(2, -1).tolist()
    return attend_pieces(query, key, value, queries, keys, scale, window, softcap).contiguous()


@attend_flat.register_fake
def _(query, key, value, lengths, scale, window, softcap):
    return value.new_empty(query.shape)


# A custom_op would hide autograd from what it calls.
BACKWARD = "fastp3o::attend_one_by_one_backward"
torch.library.define(
    BACKWARD,
    "(Tensor grad, Tensor query, Tensor key, Tensor value, Tensor lengths, float scale, int? window, float? softcap) "
    "-> (Tensor, Tensor, Tensor)",
)


@torch.library.impl(BACKWARD, "default")
def attend_flat_backward(grad, query, key, value, lengths, scale, window, softcap):
    """Computes the attention again: torch's own gradients of it need what only its autograd keeps."""
    queries, keys = lengths.view(2, -1).tolist()
    query, key, value = (tensor.detach().requires_grad_() for tensor in (query, key, value))
    # Gradient checkpointing around the layer must not count what is saved here.
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(lambda kept: kept, lambda kept: kept):
        output = attend_pieces(query, key, value, queries, keys, scale, window, softcap)
    return tuple(gradient.contiguous() for gradient in torch.autograd.grad(output, (query, key, value), grad))


@torch.library.register_fake(BACKWARD)
def _(grad, query, key, value, lengths, scale, window, softcap):
    return tuple(tensor.new_empty(tensor.shape) for tensor in (query, key, value))


def keep_inputs(ctx, inputs, output) -> None:
    *tensors, ctx.scale, ctx.window, ctx.softcap = inputs
    ctx.save_for_backward(*tensors)


def flat_backward(ctx, grad):
    gradients = torch.ops.fastp3o.attend_one_by_one_backward(
        grad, *ctx.saved_tensors, ctx.scale, ctx.window, ctx.softcap
    )
    return *gradients, None, None, None, None


attend_flat.register_autograd(flat_backward, setup_context=keep_inputs)


def attend_pieces(query, key, value, query_lengths, key_lengths, scale, window, softcap):
    # Splitting, unlike slicing, adds up the pieces' gradients in one operation.
    pieces = zip(
        query.split(query_lengths),
        key.split(key_lengths),
        value.split(key_lengths),
        strict=True,
    )
    attend: Callable[..., Tensor] = with_softcap if softcap else with_sdpa
    return torch.cat(
        [attend(*(t.transpose(0, 1) for t in piece), scale, window, softcap) for piece in pieces], dim=1
    ).transpose(0, 1)


def with_sdpa(query, key, value, scale, window, softcap):
    queries, keys = query.shape[1], key.shape[1]
    square = queries == keys and (window is None or window >= keys)
    return F.scaled_dot_product_attention(
        query.unsqueeze(0),
        key.unsqueeze(0),
        value.unsqueeze(0),
        attn_mask=None if square else visible(queries, keys, window, query.device),
        is_causal=square,
        scale=scale,
        enable_gqa=query.shape[0] != key.shape[0],
    ).squeeze(0)


def with_softcap(query, key, value, scale, window, softcap):
    key, value = (tensor.repeat_interleave(query.shape[0] // tensor.shape[0], dim=0) for tensor in (key, value))
    precise = torch.promote_types(query.dtype, torch.float32)
    products = softcap * torch.tanh(query @ key.transpose(1, 2) * (scale / softcap))
    hidden = ~visible(query.shape[1], key.shape[1], window, query.device)
    return products.masked_fill(hidden, float("-inf")).softmax(-1, dtype=precise).to(value.dtype) @ value


def visible(queries: int, keys: int, window: int | None, device: torch.device) -> Tensor:
    """[queries, keys] bool: whether a query sees a key. The last query and key are at the same position."""
    everything = torch.ones(queries, keys, dtype=torch.bool, device=device)
    past = everything.tril(keys - queries)
    return past if window is None else past.triu(keys - queries - window + 1)
