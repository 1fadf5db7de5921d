import random

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks import padded, report, test_packing, training_shapes
from benchmarks.goals import GOALS
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
def test_all_layouts_give_the_same_loss_and_gradients(policy, K):
    losses, gradients = {}, {}
    for name, layout in test_packing.LAYOUTS.items():
        update = layout(policy, *short_groups(K))
        assert len(update.losses) > 1
        policy.zero_grad()
        losses[name] = update.run()
        gradients[name] = torch.cat([parameter.grad.flatten() for parameter in policy.parameters()])
    assert gradients["padded"].norm() > 0
    for name in ("plain packing", "shared prompts"):
        torch.testing.assert_close(losses[name], losses["padded"], rtol=1e-4, atol=1e-6)
        difference = (gradients[name] - gradients["padded"]).norm() / gradients["padded"].norm()
        assert difference < 1e-4


def test_padding_is_computed_and_a_shared_prompt_once(policy):
    prompts, responses = short_groups(4)
    tokens = {name: layout(policy, prompts, responses).tokens for name, layout in test_packing.LAYOUTS.items()}
    scored = sum(len(response) for group in responses for response in group)
    assert tokens["shared prompts"] == sum(map(len, prompts)) + scored
    assert tokens["plain packing"] == 4 * sum(map(len, prompts)) + scored
    assert tokens["padded"] > tokens["plain packing"]


def test_passes_hold_as_many_pairs_as_fit_with_their_padding():
    prompts, pairs = [[1] * length for length in (3, 3, 9, 1)], [([1], [1])] * 4
    assert padded.split(prompts, pairs, 20) == [range(0, 2), range(2, 3), range(3, 4)]
    assert padded.split(prompts, pairs, 60) == [range(0, 3), range(3, 4)]
    assert padded.split(prompts, pairs, 80) == [range(0, 4)]


def update(layout, ratio, **more):
    shape = {"N": 1784, "D": 2048, "V": 128256, "prompt": 350, "response": 40, "K": 2}
    figures = {"ms": 1000 * ratio, "ratio_to_bare": ratio, "tokens": 9459, "extra_gb": 1.234}
    figures |= {"parameters": 1235814400, "dtype": "bfloat16"}
    return {"level": "training", "implementation": layout, "passes": "forward and backward", **shape, **figures, **more}


UPDATES = [
    update("padded", 1.75),
    update("plain packing", 1.01),
    update("shared prompts", 0.5),
    update("shared prompts", 0.9, prompt=128, response=128),
    update("shared prompts", 0.9, K=4),
]


def verdicts(results):
    found = [goal for goal in GOALS if "packing" in goal.goal or "padded" in goal.goal]
    return [goal.verdict(results) for goal in found]


def test_no_goal_of_a_gpu_is_met_by_times_on_a_cpu():
    sampled = {"level": "rollouts", "implementation": "fastp3o"}
    results = [*UPDATES, sampled]
    assert report.judged({"benchmarks": results, "environment": {"cuda": None}}) == [sampled | {"cuda": False}]
    everything = [result | {"cuda": True} for result in results]
    assert report.judged({"benchmarks": results, "environment": {"cuda": "13.0"}}) == everything
