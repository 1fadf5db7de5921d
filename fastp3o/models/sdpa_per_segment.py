"""Attention one segment after the other, and the keys of shared prompts, in plain torch.

T tokens (queries), U keys, H heads (Hkv of keys), D size of a head.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from fastp3o.packing.packed_row import Segments, SharedKeys


class GatherKeys(torch.autograd.Function):
    """Gathers the keys of all segments from those of the tokens. Gradients are added in a fixed order."""

    @staticmethod
    def forward(ctx, tokens, shared):
        ctx.shared = shared
        return tokens[shared.tokens]

    @staticmethod
    def backward(ctx, grad_keys):
        grad = grad_keys[ctx.shared.own]
        for tokens, keys in ctx.shared.repeats:
            grad.index_add_(0, tokens, grad_keys[keys])
        return grad, None


def gather_keys(tokens: Tensor, shared: SharedKeys) -> Tensor:
    """[T, Hkv, D] -> [U, Hkv, D]."""
    return GatherKeys.apply(tokens, shared)


# The number of segments differs from row to row, so a compiler would look into it again and again.
@torch.compiler.disable
def sdpa_per_segment(query, key, value, segments: Segments, scale, window, softcap):
    # Splitting, unlike slicing, adds up the pieces' gradients in one operation.
    pieces = zip(
        query.split(segments.query_lengths),
        key.split(segments.key_lengths),
        value.split(segments.key_lengths),
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
