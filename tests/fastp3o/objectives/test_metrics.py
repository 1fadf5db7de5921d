"""Metrics of a minibatch are means over what counts, however its prompts are packed and whatever
divides the loss.
"""

from dataclasses import replace
from functools import partial
from math import exp

import pytest
import torch
from accelerate import Accelerator

from fastp3o.models.packed_model import PackedModel
from fastp3o.models.reference import SecondModel
from fastp3o.objectives.config.online import OBJECTIVES
from fastp3o.packing.pack import Packing
from fastp3o.runtime.shares import Share
from fastp3o.training import microbatches
from fastp3o.training.microbatches import MetricSums, mean_over_steps
from tests.fastp3o.groups import groups_of_ids
from tests.fastp3o.models.model_families import random_model

P, K = 4, 2
LENGTHS = [[3 + 2 * p + k for k in range(K)] for p in range(P)]
# No response of one prompt counts, and one of another.
COUNTED = torch.tensor([[True, True], [False, False], [True, False], [True, True]])
NAMES = {"model": "m", "output_dir": "o", "prompts": "p", "reward": "r", "max_response_tokens": 100}
counted_or_all = pytest.mark.parametrize("counted", [None, COUNTED], ids=["all", "counted"])
packings = pytest.mark.parametrize("tokens_per_row", [1000, 30])


def row_metrics(
    objective: str, counted, tokens_per_row, apart: float | None = None, **settings
) -> dict[str, float]:
    """Metrics of one minibatch on the old policy. apart: log π_old − log μ of every token, μ what
    sampled, if known.
    """
    generator = torch.Generator().manual_seed(0)

    def ids(length: int) -> list[int]:
        return torch.randint(3, 48, (length,), generator=generator).tolist()

    rollouts = groups_of_ids(
        [ids(4) for _ in range(P)], [[ids(length) for length in group] for group in LENGTHS]
    )
    accelerator, objective = (
        Accelerator(cpu=True),
        OBJECTIVES[objective](**NAMES, **settings).build(),
    )
    policy, reference = PackedModel(random_model("llama")), PackedModel(random_model("llama"))
    objective.add_to(policy)
    rows = microbatches.pack_minibatches(Share(), rollouts, 1, Packing(tokens_per_row))
    old, ref = (
        partial(microbatches.policy_logprobs, policy),
        SecondModel(reference, accelerator.device, offload=False),
    )
    rewards = torch.arange(P * K).view(P, K) % 3.0
    made = microbatches.make_microbatches(accelerator, old, ref, rows, rewards, counted)
    (minibatch,) = objective.prepare(policy, made, lambda sums: sums)
    sums = MetricSums()
    for microbatch in minibatch:
        if apart is not None:
            microbatch = replace(
                microbatch, sampler_token_logprobs=microbatch.old_token_logprobs - apart
            )
        sums.add(objective.loss(policy, microbatch, 1.0)[1])
    return {
        name: value.item() for name, value in mean_over_steps(accelerator, [sums.read()]).items()
    }


@packings
@counted_or_all
def test_on_the_policy_that_sampled_ratios_are_1_and_pairs_half_right_on_average(
    counted, tokens_per_row
):
    settings = [(name, {}) for name in ("grpo", "dr_grpo", "dapo", "gspo", "cispo", "ppo")]
    settings += [("p3o", {"clipping": clipping}) for clipping in ("joint", "separate", "token")]
    settings += [("rloo", {"clipping": clipping}) for clipping in ("response", "token")]
    for name, options in settings:
        metrics = row_metrics(name, counted, tokens_per_row, **options)
        assert metrics["ratio_mean"] == pytest.approx(1, abs=1e-5)
        assert metrics["clip_fraction"] == 0
    assert row_metrics("vespo", counted, tokens_per_row)["weight_mean"] == pytest.approx(
        1, abs=1e-5
    )
    metrics = row_metrics("online_dpo", counted, tokens_per_row)
    assert metrics["accuracy"] == pytest.approx(0.5)
    assert metrics["margin"] == pytest.approx(0, abs=1e-5)


@packings
@counted_or_all
def test_metrics_of_importance_weights_are_means_over_what_is_weighed(counted, tokens_per_row):
    """Tokens, whole responses, or pairs."""
    takes_part = [[True] * K] * P if counted is None else counted.tolist()
    tokens = [exp(0.05)]
    responses = [exp(0.05 * LENGTHS[p][k]) for p in range(P) for k in range(K) if takes_part[p][k]]
    pairs = [exp(0.05 * sum(LENGTHS[p])) for p in range(P) if all(takes_part[p])]
    weighed = dict.fromkeys(("grpo", "dapo", "cispo", "ppo", "sapo"), tokens)
    weighed |= dict.fromkeys(("rloo", "gspo", "vespo", "oapl"), responses)
    weighed |= dict.fromkeys(("online_dpo", "rebel", "copg", "p3o"), pairs)
    for name, options in [(name, {}) for name in weighed] + [("p3o", {"clipping": "token"})]:
        for cap in (1.04, 1.5):
            options |= {"sampler_ratio_cap": cap, "old_logprobs": "policy"}
            metrics = row_metrics(name, counted, tokens_per_row, apart=0.05, **options)
            capped = [min(ratio, cap) for ratio in weighed[name]]
            share = sum(ratio >= cap for ratio in weighed[name]) / len(capped)
            assert metrics["sampler_ratio_mean"] == pytest.approx(
                sum(capped) / len(capped), rel=1e-4
            )
            assert metrics["sampler_ratio_capped"] == pytest.approx(share, abs=1e-6)
        with pytest.raises(
            ValueError, match="need the log-probs of what sampled, and these rollouts have none"
        ):
            row_metrics(name, counted, tokens_per_row, **options)


def test_nothing_is_divided_by_zero_where_nothing_counts():
    nothing = torch.zeros(P, K, dtype=torch.bool)
    for name, options in (
        ("p3o", {"clipping": "token"}),
        ("p3o", {}),
        ("dapo", {}),
        ("gspo", {}),
        ("vespo", {}),
    ):
        assert set(row_metrics(name, nothing, 30, **options).values()) == {0.0}
