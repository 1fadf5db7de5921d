"""Random decoding steps, and an oracle of decode attention: one softmax per token and head, in
fp64.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fastp3o_kernels.decoding import LayerCache, Slots, decode_attention
from tests.kernels.problems import DEVICE


@dataclass
class Step:
    query: Tensor
    key: Tensor
    value: Tensor
    cache: LayerCache
    slots: Slots
    settings: dict

    def to(self, dtype: torch.dtype) -> "Step":
        """A copy, the same values in another precision."""
        cache = LayerCache(*(tensor.to(dtype, copy=True) for tensor in vars(self.cache).values()))
        slots = replace(self.slots, masks={})
        return Step(
            *(t.to(dtype) for t in (self.query, self.key, self.value)), cache, slots, self.settings
        )

    def run(self, impl: str) -> Tensor:
        return decode_attention(
            self.query, self.key, self.value, self.cache, self.slots, **self.settings, impl=impl
        )

    @property
    def busy(self) -> Tensor:
        """[R] bool"""
        return self.slots.prompt < len(self.cache.prompt_keys)


def random_step(
    P=3,
    K=2,
    idle=1,
    Hkv=2,
    G=2,
    D=16,
    Lp=20,
    Lr=10,
    *,
    dtype=torch.float32,
    seed=0,
    left_out=1,
    **settings,
) -> Step:
    """Slots hold responses in random order; `left_out` responses are in none. Prompts have 0 to Lp
    tokens, and both extremes occur. Keys and values that no token may see are 1e4.
    """
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    responses = torch.randperm(P * K, generator=generator)[min(left_out, P * K) :]
    responses = torch.cat([responses, torch.full((idle,), P * K)])
    responses = responses[torch.randperm(len(responses), generator=generator)]
    R = len(responses)
    lengths = torch.randint(0, Lp + 1, (P + 1,), generator=generator)
    lengths[0], lengths[P - 1], lengths[P] = 0, Lp, 0
    steps = torch.randint(0, Lr, (R,), generator=generator)
    if R:
        steps[0], steps[R - 1] = Lr - 1, 0
    steps[responses == P * K] = 0
    cache = LayerCache(*(randn(*shape, D) for shape in [(P, Hkv, Lp)] * 2 + [(R, Hkv, Lr)] * 2))
    for p in range(P):
        cache.prompt_keys[p, :, lengths[p] :] = cache.prompt_values[p, :, lengths[p] :] = 1e4
    for r in range(R):
        cache.own_keys[r, :, steps[r] :] = cache.own_values[r, :, steps[r] :] = 1e4
    # Strides as a model's projections leave them.
    query, key, value = (randn(n, R, D).transpose(0, 1) for n in (Hkv * G, Hkv, Hkv))
    slots = Slots(responses.to(DEVICE), lengths.to(DEVICE), steps.to(DEVICE), K)
    step = Step(query, key, value, cache, slots, {"scale": 1.3 * D**-0.5} | settings)
    for name in ("query", "key", "value"):
        setattr(step, name, getattr(step, name).to(device=DEVICE, dtype=dtype))
    step.cache = LayerCache(
        *(tensor.to(device=DEVICE, dtype=dtype) for tensor in vars(cache).values())
    )
    return step


def oracle(step: Step) -> Tensor:
    """[R, H, D] fp64; 0 in idle slots."""
    R, H, D = step.query.shape
    Hkv = step.key.shape[1]
    result = torch.zeros(R, H, D, dtype=torch.float64, device=step.query.device)
    window, softcap = step.settings.get("window"), step.settings.get("softcap")
    for r in step.busy.nonzero().flatten().tolist():
        p = int(step.slots.prompt[r])
        length, own = int(step.slots.cached_lengths[p]), int(step.slots.steps[r])

        def seen(prompt: Tensor, own_cache: Tensor, new: Tensor) -> Tensor:
            parts = [prompt[p, :, :length], own_cache[r, :, :own], new[r][:, None]]  # noqa: B023
            every = torch.cat(parts, dim=1).double()
            return every[:, -window:] if window else every

        keys = seen(step.cache.prompt_keys, step.cache.own_keys, step.key)
        values = seen(step.cache.prompt_values, step.cache.own_values, step.value)
        products = (step.query[r].double().view(Hkv, -1, D) @ keys.transpose(1, 2)) * step.settings[
            "scale"
        ]
        if softcap:
            products = softcap * torch.tanh(products / softcap)
        result[r] = (products.softmax(-1) @ values).view(H, D)
    return result
