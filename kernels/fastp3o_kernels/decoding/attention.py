"""Attention of one new token per slot: over the keys of its prompt, which responses share, and over its own.

R slots, P prompts, H heads (Hkv of keys), D the size of a head.
"""

from torch import Tensor

from fastp3o_kernels.decoding import fallback
from fastp3o_kernels.decoding.cache import LayerCache, Slots
from fastp3o_kernels.operation import HAS_TRITON, use_triton

if HAS_TRITON:
    from fastp3o_kernels.decoding.attention_kernel import launch_decode_attention


def decode_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cache: LayerCache,
    slots: Slots,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    impl: str | None = None,
) -> Tensor:
    """Stores the new keys and values at own_keys[slot, :, step], then attends over all keys that a token sees.

    The host never waits for the GPU. A slot's result does not depend on what other slots hold. Idle slots get finite
    numbers without a meaning, and so do their own keys and values in the cache.

    Args:
        query: [R, H, D] fp32, fp16 or bf16, any strides.
        key, value: [R, Hkv, D]. All tensors have the cache's dtype.
        cache: keys and values of this layer. It is written to.
        slots: what the slots work on in this step.
        scale: factor of the products, usually 1/√D.
        window: the largest number of keys that a token sees, itself included.
        softcap: s: scaled products x become s tanh(x / s) (Gemma 2, arXiv 2408.00118).
        impl: None, "triton" or "eager", as in `token_logprobs`.

    Returns:
        [R, H, D].

    Raises:
        ValueError: shapes or dtypes disagree, or the window is below 1.
    """
    check_step(query, key, value, cache, slots, window)
    if use_triton(impl, query, cache.own_keys) and len(query):
        return launch_decode_attention(query, key, value, cache, slots, scale, window, softcap)
    return fallback.decode_attention(query, key, value, cache, slots, scale, window, softcap)


def check_step(query: Tensor, key: Tensor, value: Tensor, cache: LayerCache, slots: Slots, window: int | None) -> None:
    R, H, D = query.shape
    Hkv = key.shape[1]
    own, prompts = cache.own_keys.shape, cache.prompt_keys.shape
    if key.shape != (R, Hkv, D) or value.shape != key.shape or H % Hkv:
        raise ValueError(
            f"query [R, H, D] is {list(query.shape)}; key {list(key.shape)} and value {list(value.shape)} must be "
            "[R, Hkv, D], with H a multiple of Hkv"
        )
    if (own[0], own[1], own[3]) != key.shape or (prompts[1], prompts[3]) != (Hkv, D):
        raise ValueError(
            f"the cache's prompt_keys {list(prompts)} and own_keys {list(own)} are not [P, Hkv, Lp, D] and "
            f"[R, Hkv, Lr, D] for keys [R, Hkv, D] of {list(key.shape)}"
        )
    if not query.dtype == key.dtype == value.dtype == cache.own_keys.dtype == cache.prompt_keys.dtype:
        raise ValueError(
            f"query, key, value and cache must have one dtype, got {query.dtype}, {key.dtype}, {value.dtype} and "
            f"{cache.own_keys.dtype}"
        )
    if len(slots.response) != R or len(slots.steps) != R or len(slots.cached_lengths) != prompts[0] + 1:
        raise ValueError(
            f"slots must have {R} responses and steps and cached_lengths of {prompts[0]} + 1 prompts, got "
            f"{len(slots.response)}, {len(slots.steps)} and {len(slots.cached_lengths)}"
        )
    if window is not None and window < 1:
        raise ValueError(f"window must be at least 1, got {window}")
