"""The engine on a GPU: Triton's kernels, and steps as CUDA graphs; a step that waits for the device has none."""

import pytest
import torch

from fastp3o.models.packed_model import PackedModel
from fastp3o_kernels.decoding import response_keys
from tests.fastp3o.models.model_families import FAMILIES, random_model
from tests.fastp3o.rollouts.test_engine import PROMPTS, K, largest_difference, make_engine, sample

pytestmark = pytest.mark.gpu
KEYS = response_keys(3, torch.arange(len(PROMPTS)), K)


@pytest.mark.parametrize("family", FAMILIES)
def test_captured_steps_give_the_responses_of_others_and_follow_the_weights_in_place_and_moved(family, device):
    policy = PackedModel(random_model(family)).to(device)
    engine = make_engine(policy, graph=True)
    for scale in (1.0, 1.1):
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter.mul_(scale)
        ids, logprobs = engine.run(PROMPTS, KEYS)
        captured = engine.graph.graph
        assert captured is not None
        assert ids == sample(policy)[0]
        assert largest_difference(policy, ids, logprobs) < 1e-4
        # The memory comes back, and one graph serves again.
        engine.release_memory()
        assert engine.run(PROMPTS, KEYS)[0] == ids
    for parameter in policy.parameters():
        parameter.data = parameter.data.clone()
    assert engine.run(PROMPTS, KEYS)[0] == ids
    assert engine.graph.graph is not captured
