"""The body's pass of a step, compiled by torch: norms, rotary embeddings, gates and residuals become few kernels.

Attention stays an operation that the compiler does not look into: it writes to the cache, which every step shares.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from transformers.utils.logging import get_logger

from fastp3o.models.packed_model import PackedModel
from fastp3o.rollouts.cache import Cache

logger = get_logger(__name__)

# Caches of the steps in progress, the newest last: the operation below can be handed tensors and numbers alone.
attended: list[Cache] = []


@torch.library.custom_op("fastp3o::attend_to_cache", mutates_args=())
def attend_to_cache(
    query: Tensor, key: Tensor, value: Tensor, layer: int, scale: float, window: int | None, softcap: float | None
) -> Tensor:
    return attended[-1].attend(layer, query, key, value, scale=scale, window=window, softcap=softcap)


@attend_to_cache.register_fake
def _(
    query: Tensor, key: Tensor, value: Tensor, layer: int, scale: float, window: int | None, softcap: float | None
) -> Tensor:
    return value.new_empty(query.shape)


class CacheOfTheStep:
    """A KeyValueCache in place of that of the step in progress."""

    def store(self, layer: int, key: Tensor, value: Tensor) -> None:
        raise NotImplementedError("prompts are not compiled")

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> Tensor:
        return attend_to_cache(query, key, value, layer, scale, window, softcap)


@contextmanager
def attending(cache: Cache) -> Iterator[None]:
    attended.append(cache)
    try:
        yield
    finally:
        attended.pop()


class CompiledBody:
    """`PackedModel.hidden_states` of steps of one shape.

    torch keeps what it compiled, on disk too. A body that does not compile runs as it is, which is said.
    """

    def __init__(self, policy: PackedModel):
        self.policy = policy
        self.compiled = torch.compile(policy.hidden_states, fullgraph=True, dynamic=False)
        self.cache = CacheOfTheStep()
        self.tried = self.fails = False

    def __call__(self, input_ids: Tensor, position_ids: Tensor, cache: Cache) -> Tensor:
        if not self.tried:
            self.tried = True
            self.try_to_compile(input_ids, position_ids, cache)
        if self.fails:
            return self.policy.hidden_states(input_ids, position_ids, cache=cache)
        with attending(cache):
            return self.compiled(input_ids, position_ids, cache=self.cache)

    def try_to_compile(self, input_ids: Tensor, position_ids: Tensor, cache: Cache) -> None:
        logger.warning_once("compiling the step that samples: a minute or so, and seconds once it is on disk")
        try:
            with attending(cache):
                self.compiled(input_ids, position_ids, cache=self.cache)
        except Exception as error:  # whatever a model does that the compiler does not take
            self.fails = True
            logger.warning(f"sampling runs without compiled steps: compiling failed with: {error}")
