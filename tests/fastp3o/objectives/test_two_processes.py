"""Two processes against one, for every objective and for what some add to the loop. Runs share
processes, for time.
"""

from pathlib import Path

import pytest

from tests.fastp3o.objectives.test_runs import NEW, SETTINGS
from tests.fastp3o.runs import copy_at_save_before
from tests.fastp3o.training.test_distributed import (
    FP32,
    ONLINE,
    assert_same_metrics,
    furthest,
    train,
)

BESIDE = {
    "p3o that samples ties again": [
        "p3o",
        "--dynamic_sampling",
        "2",
        "--reward",
        "rewards_for_tests:vowels",
    ],
    "p3o after its own": [
        "p3o",
        "--reference_every",
        "1",
        "--target_kl",
        "0.01",
        "--kl_per_update",
        "0.1",
    ],
    "p3o after a mean": ["p3o", "--reference_decay", "0.5"],
    "ipo from a mixture": ["online_ipo", "--mixture", "0.5"],
    "ppo with a penalty": ["ppo", "--step_bound", "penalty"],
    "p3o truncated": ["p3o", "--top_k", "9", "--sampler_ratio_cap", "2"],
    "grpo with a mix": [
        "grpo",
        "--entropy_coef",
        "0.1",
        "--ptx_data",
        "sft.jsonl",
        "--ptx_batch_size",
        "4",
    ],
    "a function": ["losses_for_tests:gated", "--loss_mean", "token"],
}
FUNCTION = """
def gated(groups, old_tokens, rewards):
    gates = ((groups.token_logprobs - old_tokens).exp() - 1).sigmoid()
    worth = groups.per_token(rewards - rewards.mean(1, keepdim=True))
    return -(worth * gates).sum(), {"gate": gates.sum()}
"""


@pytest.mark.parametrize(
    ("names", "beside"),
    [
        (["dapo", "rebel"], [*BESIDE][1::3]),  # a mean over tokens, and pairs
        pytest.param(NEW, [*BESIDE], marks=pytest.mark.nightly),
    ],
)
def test_two_processes_train_what_one_does_and_go_on(workplace, tiny_model, names, beside):
    Path("losses_for_tests.py").write_text(FUNCTION)
    own = {
        name: [
            part
            for setting, value in SETTINGS.get(name, {}).items()
            for part in (f"--{setting}", str(value))
        ]
        for name in names
    }
    runs = {name: [name, *flags] for name, flags in own.items()} | {
        name: BESIDE[name] for name in beside
    }
    common = [
        "online",
        *ONLINE,
        *FP32,
        "--model",
        tiny_model,
        "--updates",
        "2",
        "--save_every",
        "1",
        "--objective",
    ]
    for folder, processes in (("one", 1), ("two", 2)):
        train({name: [*common, *flags] for name, flags in runs.items()}, folder, processes)
    for name in runs:
        assert furthest(f"one/{name}", f"two/{name}") <= 3e-6, name
        assert_same_metrics(name)
    # Those with something beside the objective go on in two.
    for name in beside:
        copy_at_save_before(f"two/{name}", f"resumed/{name}")
    train({name: [*common, *BESIDE[name], "--resume"] for name in beside}, "resumed", 2)
    for name in beside:
        assert furthest(f"resumed/{name}", f"two/{name}") == 0, name
