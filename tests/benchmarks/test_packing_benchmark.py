import random
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks import padded, report, test_packing, training_shapes
from benchmarks.conftest import order
from benchmarks.goals import GOALS, NOT_MEASURED
from benchmarks.shapes import TOKENS
from benchmarks.training_shapes import LENGTHS, RESPONSES, llama, random_groups

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


def test_prompts_end_and_responses_begin_in_the_same_column():
    batch = padded.pad([[5, 6], [7]], [([1], [2, 3]), ([4], [8])])
    assert batch.input_ids.tolist() == [[5, 6, 1, 0], [5, 6, 2, 3], [0, 7, 4, 0], [0, 7, 8, 0]]
    assert batch.attention_mask.tolist() == [[1, 1, 1, 0], [1, 1, 1, 1], [0, 1, 1, 0], [0, 1, 1, 0]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 2], [0, 1, 2, 3], [0, 0, 1, 1], [0, 0, 1, 1]]
    assert batch.prompt_length == 2


def test_passes_hold_as_many_pairs_as_fit_with_their_padding():
    prompts, pairs = [[1] * length for length in (3, 3, 9, 1)], [([1], [1])] * 4
    assert padded.split(prompts, pairs, 20) == [range(0, 2), range(2, 3), range(3, 4)]
    assert padded.split(prompts, pairs, 60) == [range(0, 3), range(3, 4)]
    assert padded.split(prompts, pairs, 80) == [range(0, 4)]


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_lengths_vary_around_their_means(lengths):
    prompts, responses = random_groups(lengths, 2)
    assert all(lengths.prompt // 2 <= len(prompt) <= 3 * lengths.prompt // 2 for prompt in prompts)
    drawn = [len(response) for group in responses for response in group]
    assert all(lengths.response // 2 <= length <= 3 * lengths.response // 2 for length in drawn)
    assert len(set(drawn)) > 1
    assert random_groups(lengths, 2) == (prompts, responses)


def test_memory_is_beyond_weights_and_gradients(policy):
    weight = policy.model.lm_head.weight
    weight.grad = torch.zeros_like(weight)
    peak = test_packing.peak_bytes(policy, lambda: weight.t() + weight.grad.t())
    # A GPU's allocator rounds up.
    assert 4 * weight.numel() <= peak < 4 * weight.numel() + 512


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


def test_goals_of_packing_are_about_the_lengths_of_tldr_and_pairs():
    assert verdicts(UPDATES) == [("2.00 ×", "met"), ("3.50 ×", "met")]
    assert verdicts(UPDATES[3:]) == [(NOT_MEASURED, NOT_MEASURED)] * 2
    assert verdicts(UPDATES[1:3]) == [("2.00 ×", "met"), (NOT_MEASURED, NOT_MEASURED)]
    slow = [update("padded", 1.4), update("shared prompts", 0.7)]
    assert verdicts(slow) == [("1.43 ×", "not met"), ("2.00 ×", "not met")]


def test_other_goals_are_not_about_updates():
    verdicts = [goal.verdict(UPDATES) for goal in GOALS]
    assert sum(verdict.met != NOT_MEASURED for verdict in verdicts) == 2


def test_no_goal_of_a_gpu_is_met_by_times_on_a_cpu():
    sampled = {"level": "rollouts", "implementation": "fastp3o"}
    results = [*UPDATES, sampled]
    assert report.judged({"benchmarks": results, "environment": {"cuda": None}}) == [sampled | {"cuda": False}]
    everything = [result | {"cuda": True} for result in results]
    assert report.judged({"benchmarks": results, "environment": {"cuda": "13.0"}}) == everything


def test_tables():
    lines = report.packing(UPDATES)
    assert lines[1][:3] == ["128, 128", "2", "shared prompts"]
    assert lines[2] == ["350, 40", "2", "shared prompts", "9459", "500", "2.00", "1.23"]
    assert [line[2] for line in lines[2:]] == ["shared prompts", "plain packing", "padded", "shared prompts"]


def test_updates_come_after_the_kernels_at_the_first_number_of_tokens():
    def item(name, **params):
        return SimpleNamespace(name=name, callspec=SimpleNamespace(params=params))

    wanted = [
        item("test_forward_and_backward", tokens=TOKENS[0]),
        item("test_forward_and_backward_of_peers", tokens=TOKENS[0]),
        item("test_training", layout="padded"),
        item("test_forward_and_backward", tokens=TOKENS[1]),
        item("test_passes_apart"),
    ]
    assert sorted(wanted[2:] + wanted[:2], key=order) == wanted
