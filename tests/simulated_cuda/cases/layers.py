"""Launches of a layer on the pretended device: what two layers take more than one does."""

from collections import Counter
from collections.abc import Callable

import pytest
import torch

from fastp3o.models.packed_model import PackedModel
from fastp3o.packing.pack import Packing, pack
from fastp3o.rollouts.cache import Room
from fastp3o.rollouts.engine import Engine, layer_shapes
from fastp3o_kernels.decoding import response_keys
from tests.fastp3o.models.model_families import random_model
from tests.simulated_cuda.host import recorded, write_counts

PROMPTS, RESPONSES, K = [[3, 4, 5], [6, 7]], [[[5, 6, 7], [8, 9]], [[1, 2], [3, 4, 5]]], 2
KEYS = response_keys(0, torch.arange(2), K)
# Before norms, rotary positions, gates and sums were one kernel each: 40, 78, 39 and 40 of Llama's.
# Before the engine's q, k and v, and gate and up, were one product each: 14 and 15 of a step and of
# prompts.
LAUNCHES = {
    "llama": {"forward": 15, "backward": 33, "step": 11, "prefill": 12},
    "qwen3": {"forward": 17, "backward": 37, "step": 13, "prefill": 14},
    "gemma3": {"forward": 18, "backward": 40, "step": 14, "prefill": 15},
}


def counted(work: Callable[[], object]) -> Counter[str]:
    with recorded() as record:
        work()
    assert not record.waits
    return record.launches


def launches(family: str, layers: int) -> dict[str, Counter[str]]:
    policy = PackedModel(random_model(family, num_hidden_layers=layers).bfloat16()).to("cuda")
    (row,) = pack(PROMPTS, RESPONSES, Packing(tokens_per_row=100))
    row = row.to(torch.device("cuda", 0))
    hidden: list[torch.Tensor] = []
    inputs = (row.input_ids, row.position_ids)
    counts = {
        "forward": counted(
            lambda: hidden.append(policy.hidden_states(*inputs, segments=row.segments))
        )
    }
    gradient = torch.ones_like(hidden[0])
    counts["backward"] = counted(lambda: hidden[0].backward(gradient))
    with torch.no_grad():
        engine = Engine(policy, layer_shapes(policy, 3), Room(2, 4, K, 4, 12), {0}, graph=False)
        engine.queue.fill(PROMPTS, KEYS)
        with engine.without_gradients():
            engine.prefill(PROMPTS)  # first lengths are counted on the host
            counts["step"] = counted(engine.step)
            with recorded() as record:
                engine.prefill(PROMPTS)
    return counts | {"prefill": record.launches}


@pytest.mark.parametrize("family", LAUNCHES)
def test_launches_of_a_layer(family):
    one, two = launches(family, 1), launches(family, 2)
    counts = {phase: two[phase] - one[phase] for phase in two}
    for phase, allowed in LAUNCHES[family].items():
        assert counts[phase].total() <= allowed, (phase, counts[phase])
    write_counts(f"a layer of {family}", {phase: count.total() for phase, count in counts.items()})
