"""Attention of one new token per slot: over the keys of its prompt, which responses share, and over
its own.

R slots, P prompts, H heads (Hkv of keys), D the size of a head.
"""

import torch
from torch import Tensor

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
    """Stores the new keys and values at own_keys[slot, :, step], then attends over all keys that a
    token sees.

    The host never waits for the GPU. A slot's result does not depend on what other slots hold. Idle
    slots get finite numbers without a meaning, and so do their own keys and values in the cache.

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
    """
    if use_triton(impl, query, cache.own_keys) and len(query):
        return launch_decode_attention(query, key, value, cache, slots, scale, window, softcap)

    # One matrix product multiplies the keys of a prompt with the queries of its K responses and of
    # the G = H / Hkv heads of a group, so keys are read once. Queries are therefore brought from
    # the order of slots into that of responses ("grouped"). Products with a slot's own keys join
    # them for one softmax. The weights of own keys and the results then go back to the order of
    # slots.
    R, H, D = query.shape
    Hkv, K = key.shape[1], slots.responses_per_prompt
    G = H // Hkv
    cache.own_keys[slots.number, :, slots.steps] = key
    cache.own_values[slots.number, :, slots.steps] = value
    P, Lp, Lr = len(cache.prompt_keys), cache.prompt_keys.shape[2], cache.own_keys.shape[2]

    query = query * scale
    grouped = (
        query.index_select(0, slots.grouped)
        .view(P, K, Hkv, G, D)
        .transpose(1, 2)
        .reshape(P, Hkv, K * G, D)
    )
    # Keys times queries: on a CPU up to twice as fast as queries times keys.
    prompt_part = (cache.prompt_keys @ grouped.transpose(2, 3)).transpose(2, 3)
    own_part = query.reshape(R, Hkv, G, D) @ cache.own_keys[:R].transpose(2, 3)
    own_part = own_part.index_select(0, slots.grouped).view(P, K, Hkv, G, Lr).transpose(1, 2)
    products = torch.cat([prompt_part.unflatten(2, (K, G)), own_part], dim=4)
    products = products.to(torch.promote_types(products.dtype, torch.float32))
    if softcap is not None:
        products = products.div_(softcap).tanh_().mul_(softcap)
    if window not in slots.masks:
        slots.masks[window] = hidden_keys(slots, Lp, Lr, window)
    products += slots.masks[window]
    weights = products.softmax(4).to(query.dtype)

    prompt_part, own_part = weights.split([Lp, Lr], dim=4)
    result = prompt_part.flatten(2, 3) @ cache.prompt_values
    result = (
        result.view(P, Hkv, K, G, D)
        .transpose(1, 2)
        .reshape(P * K, Hkv, G, D)
        .index_select(0, slots.place)
    )
    own_part = own_part.transpose(1, 2).reshape(P * K, Hkv, G, Lr).index_select(0, slots.place)
    return result.add_(own_part @ cache.own_values[:R]).view(R, H, D)


def hidden_keys(slots: Slots, Lp: int, Lr: int, window: int | None) -> Tensor:
    """[P, 1, K, 1, Lp + Lr] fp32: 0 for keys that the token sees, -inf for the others."""
    device, lengths = slots.steps.device, slots.cached_lengths[:-1, None, None]
    steps = slots.steps[slots.grouped].view(len(lengths), -1, 1)
    # Number of tokens from each key to the step's token.
    prompt_distance = lengths + steps - torch.arange(Lp, device=device)
    own_distance = steps - torch.arange(Lr, device=device)
    hidden = torch.cat([prompt_distance <= steps, own_distance < 0], dim=2)
    if window is not None:
        hidden |= torch.cat([prompt_distance, own_distance], dim=2) >= window
    mask = torch.zeros(hidden.shape, device=device).masked_fill_(hidden, float("-inf"))
    return mask[:, None, :, None]
