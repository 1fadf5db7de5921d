import random

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks import test_packing, training_shapes
from benchmarks.training_shapes import RESPONSES, llama

TINY = llama(32, 48, 2, 4, 2, 61)


@pytest.fixture
def policy(monkeypatch):
    monkeypatch.setattr(test_packing, "CONFIG", TINY)
    monkeypatch.setattr(test_packing, "DTYPE", torch.float32)
    monkeypatch.setattr(training_shapes, "TOKENS_PER_PASS", 60)
    return test_packing.random_model(AutoModelForCausalLM)


def short_groups(K):
    generator = random.Random(0)

    def ids():
        return [generator.randrange(TINY.vocab_size) for _ in range(generator.randint(1, 9))]

    return [ids() for _ in range(8)], [[ids() for _ in range(K)] for _ in range(8)]


@pytest.mark.parametrize("K", RESPONSES)
def test_all_layouts_give_the_same_loss_and_gradients_of_fewer_tokens(policy, K):
    losses, gradients, tokens = {}, {}, {}
    prompts, responses = short_groups(K)
    for name, layout in test_packing.LAYOUTS.items():
        update = layout(policy, prompts, responses)
        assert len(update.losses) > 1
        policy.zero_grad()
        losses[name], tokens[name] = update.run(), update.tokens
        gradients[name] = torch.cat([parameter.grad.flatten() for parameter in policy.parameters()])
    norm = gradients["padded"].norm()
    assert norm > 0
    for name in ("plain packing", "shared prompts"):
        torch.testing.assert_close(losses[name], losses["padded"], rtol=1e-4, atol=1e-6)
        assert (gradients[name] - gradients["padded"]).norm() < 1e-4 * norm
    scored = sum(len(response) for group in responses for response in group)
    assert tokens["shared prompts"] == sum(map(len, prompts)) + scored
    assert tokens["plain packing"] == K * sum(map(len, prompts)) + scored
    assert tokens["padded"] > tokens["plain packing"]
