"""TRPO's step against a dense Fisher matrix, which transformers' own logits give, one response at a
time.
"""

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.func import functional_call, grad, jacrev
from torch.nn.utils import parameters_to_vector as vector_of

from fastp3o.errors import UserError
from fastp3o.models import sharding
from fastp3o.models.packed_model import PackedModel, labeled_logprobs
from fastp3o.objectives import trpo
from fastp3o.objectives.base import Microbatch
from fastp3o.objectives.config.trpo import TRPOConfig
from fastp3o.objectives.trpo import Neighborhood
from fastp3o.packing.pack import Packing, pack
from fastp3o.training import setup
from fastp3o.training.loop import train
from tests.fastp3o.models.model_families import FOURS, random_model
from tests.fastp3o.objectives.test_runs import train_and_resume
from tests.fastp3o.runs import assert_equal, config, metrics, weights, weights_of_start

COUNTED = torch.tensor([[True, False, True, True], [False] * 4])
counted_or_all = pytest.mark.parametrize("counted", [None, COUNTED], ids=["all", "counted"])


def tiny_policy(dtype: torch.dtype = torch.float64) -> PackedModel:
    """GPT-2, whose norms keep fp64."""
    policy = PackedModel(random_model("gpt2", hidden_size=8, num_hidden_layers=1).to(dtype))
    policy.temperature = 0.7
    return policy


def batches(policy: PackedModel, counted: Tensor | None) -> list[Microbatch]:
    """A row for each prompt, with random advantages."""
    generator, found, unused = torch.Generator().manual_seed(1), [], torch.empty(0)
    for row in pack(FOURS.prompts, FOURS.responses, Packing(20)):
        old = labeled_logprobs(policy, row).detach()
        advantages = torch.randn(len(old), generator=generator, dtype=torch.float64).to(old.dtype)
        one = Microbatch(row, unused, old, unused, prepared={"advantages": advantages})
        found.append(replace(one, loss_mask=None if counted is None else counted[list(row.groups)]))
    return found


def step(policy: PackedModel, counted: Tensor | None, **changes) -> dict[str, float]:
    objective = TRPOConfig(model="", output_dir="", prompts="", reward="", **changes).build()
    objective.conclude(policy, [[one] for one in batches(policy, counted)], lambda sums: sums)
    return objective.step_metrics


class Dense:
    """Log-probs of the vocabulary [N, V] at the tokens that count as a function of all parameters,
    and what follows.
    """

    def __init__(self, counted: Tensor | None):
        rows = batches(policy := tiny_policy(), counted)
        places = [(g, k) for one in rows for g in one.row.groups for k in range(4)]
        self.places = [place for place in places if counted is None or counted[place]]
        counts = torch.tensor(
            [place in self.places for place in places for _ in FOURS.responses[place[0]][place[1]]]
        )
        self.advantages = torch.cat([one.prepared["advantages"] for one in rows])[counts]
        self.labels = torch.tensor(
            [token for g, k in self.places for token in FOURS.responses[g][k]]
        )
        self.policy, self.start = policy, vector_of(policy.parameters()).detach()
        self.before = self.logprobs(self.start)
        jacobian = jacrev(self.logprobs)(self.start)
        self.fisher = torch.einsum("tvi,tv,tvj->ij", jacobian, self.before.exp(), jacobian) / len(
            self.labels
        )
        self.gradient = grad(self.surrogate)(self.start)

    def logprobs(self, at: Tensor) -> Tensor:
        shapes = {name: one.shape for name, one in self.policy.model.named_parameters()}
        parts, logits = at.split([shape.numel() for shape in shapes.values()]), []
        named = {name: part.view(shapes[name]) for name, part in zip(shapes, parts, strict=True)}
        with self.policy.with_own_attention() as model:
            for g, k in self.places:
                ids = torch.tensor([FOURS.prompts[g] + FOURS.responses[g][k]])
                logits.append(
                    functional_call(model, named, (ids,)).logits[0, len(FOURS.prompts[g]) - 1 : -1]
                )
        return (torch.cat(logits) / 0.7).log_softmax(1)

    def surrogate(self, at: Tensor) -> Tensor:
        log_ratios = (self.logprobs(at) - self.before).gather(1, self.labels[:, None])[:, 0]
        return (log_ratios.exp() * self.advantages).mean()


@counted_or_all
@pytest.mark.parametrize(
    ("dtype", "near", "error"), [(torch.float64, 1e-10, 1e-6), (torch.float32, trpo.NEAR, 5e-3)]
)
def test_fisher_products_are_those_of_the_dense_matrix(monkeypatch, counted, dtype, near, error):
    monkeypatch.setattr(trpo, "NEAR", near)
    policy, dense = tiny_policy(dtype), Dense(counted)
    around = Neighborhood(policy, batches(policy, counted))
    for size in (0.01, 1.0, 100.0):
        vector = size * torch.randn(len(dense.start), dtype=torch.float64)
        expected = dense.fisher @ vector
        assert (
            around.fisher_product(vector.to(dtype)).double() - expected
        ).norm() < error * expected.norm()


@counted_or_all
@pytest.mark.parametrize("max_kl", [1e-6, 0.02])
def test_a_step_is_along_the_natural_gradient_as_far_as_the_bound(monkeypatch, counted, max_kl):
    monkeypatch.setattr(trpo, "NEAR", 1e-10)
    policy, dense = tiny_policy(), Dense(counted)
    done = step(policy, counted, max_kl=max_kl, cg_steps=60, cg_damping=0.05)
    moved = (end := vector_of(policy.parameters()).detach()) - dense.start
    natural = torch.linalg.solve(dense.fisher + 0.05 * torch.eye(len(moved)), dense.gradient)
    assert (moved / moved.norm() - natural / natural.norm()).norm() < 1e-4
    quadratic = (0.5 * moved @ dense.fisher @ moved).item()
    assert quadratic == pytest.approx(max_kl * 0.64 ** (done["line_search_steps"] - 1), rel=1e-4)
    kls = (dense.before.exp() * (dense.before - dense.logprobs(end))).sum(1)
    assert done["trpo_kl"] == pytest.approx(kls.mean().item(), rel=1e-6)
    assert max_kl / 3 < done["trpo_kl"] <= max_kl
    gain = dense.surrogate(end) - dense.surrogate(dense.start)
    assert 0 < done["surrogate_gain"] == pytest.approx(gain.item())
    assert done["grad_norm"] == pytest.approx(dense.gradient.norm().item())


def test_the_line_search_goes_back_to_the_bound_and_refuses_what_is_no_better(monkeypatch):
    plain = Neighborhood.fisher_product
    monkeypatch.setattr(
        Neighborhood, "fisher_product", lambda self, vector: plain(self, vector) / 9
    )  # too flat
    done = step(tiny_policy(), None, max_kl=1e-3)
    assert 4 <= done["line_search_steps"] <= 7
    assert 6e-4 < done["trpo_kl"] <= 1e-3
    for sign, counted in ((1, torch.zeros(2, 4, dtype=torch.bool)), (-1, None)):  # -1: downhill
        monkeypatch.setattr(
            trpo, "conjugate_gradients", lambda product, target, *_, sign=sign: sign * target
        )
        done = step(policy := tiny_policy(), counted, line_search_steps=3)
        assert (done["line_search_steps"], done["trpo_kl"], done["surrogate_gain"]) == (3, 0.0, 0.0)
        assert torch.equal(vector_of(policy.parameters()), vector_of(tiny_policy().parameters()))


def test_what_the_step_cannot_bound_is_refused_before_data_and_models_load(
    workplace, tiny_model, monkeypatch
):
    refused = [
        {"precision": "auto"},
        {"precision": "bf16-autocast"},
        {"quantize": "8bit", "lora_rank": 2},
    ]
    for changes in [
        *refused,
        {"ptx_data": "texts"},
        {"sampler_ratio_cap": 2.0},
        {"kl_per_update": 1.0},
    ]:
        with pytest.raises(UserError, match=f"--objective trpo .*--{next(iter(changes))}"):
            config(tiny_model, "run", TRPOConfig, **changes)
    with pytest.raises(UserError, match=r"--learning_rate has no effect .*--critic_learning_rate"):
        config(tiny_model, "run", TRPOConfig, learning_rate=3e-3)
    monkeypatch.setattr(sharding, "number_of_processes", lambda: 2)
    monkeypatch.setattr(setup, "process_mesh", lambda *_: None)
    with pytest.raises(UserError, match="--objective trpo trains in one process"):
        train(config(tiny_model, "run", TRPOConfig, prompts="missing.jsonl"))


@pytest.mark.parametrize(
    "changes", [{}, {"lora_rank": 2, "gradient_checkpointing": True, "old_logprobs": "sampler"}]
)
def test_a_run_stays_within_the_bound_learns_and_resumes_exactly(workplace, tiny_model, changes):
    changes |= {
        "reward": "rewards_for_tests:varied",
        "max_kl": 0.02,
        "critic_learning_rate": 1e-3,
        "save_every": 2,
    }
    steps = train_and_resume(tiny_model, "whole", TRPOConfig, kl_coef=0.0, **changes)
    assert all(0 < one["trpo_kl"] <= 0.02 and one["surrogate_gain"] > 0 for one in steps)
    assert any(
        not torch.equal(weights("whole")[name], start)
        for name, start in weights_of_start(tiny_model).items()
    )


def test_adamw_moves_the_critic_alone(workplace, tiny_model):
    train(config(tiny_model, "still", TRPOConfig, max_kl=1e-30, critic_learning_rate=1e-2))
    assert_equal(weights("still"), weights_of_start(tiny_model))
    assert metrics("still")[-1]["value_loss"] < metrics("still")[0]["value_loss"]
