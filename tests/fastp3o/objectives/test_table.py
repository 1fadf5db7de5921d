"""What stands in the table of objectives is whole: exported, documented, compared with an oracle,
run; and none of its options is without effect.
"""

import re
from collections.abc import Callable
from copy import deepcopy
from dataclasses import Field, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor

import fastp3o
from fastp3o.config import Flags, OptimizerConfig, broken_rule
from fastp3o.errors import UserError
from fastp3o.models.packed_model import PackedModel, labeled_logprobs
from fastp3o.models.reference import SecondModel
from fastp3o.objectives.base import Microbatch
from fastp3o.objectives.config.base import OnlineConfig
from fastp3o.objectives.config.online import OBJECTIVES
from fastp3o.objectives.config.preferences import OFFLINE_OBJECTIVES, KTOConfig, PreferenceConfig
from fastp3o.objectives.preferences import fixed_pair_sums, kto_sums
from fastp3o.optimizer.optimizer import Optimizer
from fastp3o.packing.pack import Packing, pack
from fastp3o.runtime.precision import choose_precision
from fastp3o_kernels import Groups
from tests.fastp3o.models.model_families import random_model
from tests.fastp3o.objectives import (
    test_distillation,
    test_formulas,
    test_ppo,
    test_runs,
    test_trpo,
)
from tests.fastp3o.training import test_p3o_in_one_file, test_preference

FOLDER = Path(fastp3o.__file__).parent / "objectives"
# Oracles and runs of those that have files of their own.
ORACLES = {
    "p3o": test_p3o_in_one_file.test_it_gives_the_trainers_numbers,
    "ppo": test_ppo.test_the_first_step_is_the_policy_gradient,
    "trpo": test_trpo.test_a_step_is_along_the_natural_gradient_as_far_as_the_bound,
    "distillation": test_distillation.test_the_exact_loss_and_its_gradients_are_those_of_dense_kls,
}
RUNS = {
    "p3o": test_runs.test_learning_rate_and_coefficient_follow_what_updates_move_and_are_resumed,
    "ppo": test_ppo.test_a_run_with_a_penalty_is_resumed_with_the_critic,
    "trpo": test_trpo.test_a_run_stays_within_the_bound_learns_and_resumes_exactly,
}


# --- each is whole --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*OBJECTIVES, *OFFLINE_OBJECTIVES])
def test_an_objective_is_exported_and_stands_on_the_page(name):
    config = (OBJECTIVES | OFFLINE_OBJECTIVES)[name]
    exported = getattr(fastp3o, config.__name__, None)
    assert exported is config, f"fastp3o/__init__.pyi lacks {config.__name__}"
    rows = re.findall(r"^\|([^|]*)\|", (FOLDER / "README.md").read_text(), re.MULTILINE)
    named = any(f"`{name}`" in row for row in rows)
    assert named, f"no row of fastp3o/objectives/README.md names {name}"


@pytest.mark.parametrize("name", OBJECTIVES)
def test_an_objective_has_a_second_implementation_and_a_run(name):
    compared = {case.split()[0] for case in test_formulas.CASES} | ORACLES.keys()
    assert name in compared, "no case of test_formulas.py"
    assert name in {*test_runs.NEW, *RUNS}


def test_fixed_preferences_have_oracle_and_run_by_their_table():
    (compared,) = (
        mark
        for mark in test_preference.test_an_update_is_that_of_the_formula.pytestmark
        if mark.args[0]
    )
    assert OFFLINE_OBJECTIVES.keys() <= {objective for objective, _ in compared.args[1]}


def test_the_page_of_ratios_names_every_objective_that_trains_on_rewards():
    text = (FOLDER / "off_policy.md").read_text()
    # `online_dpo`, `online_ipo`, ...
    one_line = {name for name in OBJECTIVES if name.startswith("online_")}
    missing = OBJECTIVES.keys() - one_line - {"distillation"} - set(re.findall(r"`(\w+)", text))
    assert not missing, (
        f"fastp3o/objectives/off_policy.md names none of: {', '.join(sorted(missing))}"
    )


# --- each option has an effect, or is refused -----------------------------------------------------

NAMES = {"model": "m", "output_dir": "o", "prompts": "p", "reward": "r", "max_response_tokens": 9}
P, K = 2, 4
# Options of objectives whose effect one loss of random responses does not show.
ELSEWHERE = {
    "process_rewards": "the loop hands rewards of tokens to the loss",
    "mixture": "it is sampled",
    "teacher_context": "the loop's reference sees it",
    "pair_weights": "only rewards that compare have weights of pairs",
    "line_search_steps": "the first try is taken here",
}


def named(config: type[Flags]) -> dict[str, Any]:
    """What a configuration must have."""
    known = {flag.name for flag in fields(config)}
    return {name: value for name, value in (NAMES | {"train_data": "d"}).items() if name in known}


def other_values(flag: Field) -> list[Any]:
    """Values that differ from an option's default and keep its bounds."""
    rules, default = flag.metadata, flag.default
    if "choices" in rules:
        return [choice for choice in rules["choices"] if choice != default]
    if isinstance(default, bool):
        return [not default]
    start = 0.5 if default is None else default
    near = (start / 100, start / 2, start, 2 * start, start + 0.3, start + 2, 1)
    values = {int(value) if isinstance(default, int) else value for value in near} - {default}
    return [value for value in sorted(values) if not broken_rule(value, rules)]


def own_options(config: type[Flags], shared: type[Flags]) -> list[Field]:
    """The options that a configuration does not have for being one of its stage."""
    return [
        flag for flag in fields(config) if flag.name not in {one.name for one in fields(shared)}
    ]


def settings_of(config: type[Flags], options: list[Field]) -> list[dict[str, Any]]:
    """The defaults, and each other choice of an option that has several, where it goes alone."""
    choices = [
        {flag.name: value}
        for flag in options
        if "choices" in flag.metadata
        for value in other_values(flag)
    ]
    return [{}, *(choice for choice in choices if made(config, choice) is not None)]


def made(config: type[Flags], changes: dict[str, Any]) -> Any:
    """The configuration with these changes; None if it refuses them."""
    try:
        return config(**named(config) | changes)
    except UserError:
        return None


def without_effect(
    config: type[Flags], shared: type[Flags], outcome: Callable[[Any], list[Tensor]]
) -> list[str]:
    """The options that change nothing, and are not refused, beside each choice of others."""
    options, found = own_options(config, shared), []
    for setting in settings_of(config, options):
        plain = outcome(made(config, setting))
        for flag in options:
            if flag.name in {*setting, *ELSEWHERE}:
                continue
            changed = [made(config, setting | {flag.name: value}) for value in other_values(flag)]
            taken = [one for one in changed if one is not None]
            if taken and all(same(plain, outcome(one)) for one in taken):
                found.append(
                    " ".join(
                        [flag.name, *(f"with {name}={value}" for name, value in setting.items())]
                    )
                )
    return found


def same(some: list[Tensor], others: list[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(some, others, strict=True))


@cache
def rollouts() -> tuple[Microbatch, PackedModel, SecondModel]:
    """A row of random responses, with the log-probs of a policy, of what sampled and of a
    reference.
    """
    generator = torch.Generator().manual_seed(0)

    def ids(length: int) -> list[int]:
        return torch.randint(3, 48, (length,), generator=generator).tolist()

    prompts, responses = (
        [ids(3) for _ in range(P)],
        [[ids(2 + k + p) for k in range(K)] for p in range(P)],
    )
    (row,) = pack(prompts, responses, Packing(1000))
    policy, other = PackedModel(random_model("llama")), PackedModel(random_model("llama"))
    with torch.no_grad():
        for weight in other.parameters():
            weight += 0.1 * torch.randn(weight.shape, generator=generator)
        old = labeled_logprobs(policy, row) + 0.1 * torch.randn(
            len(row.labels), generator=generator
        )
    sampler, ref = (old + 0.3 * torch.randn(len(old), generator=generator) for _ in range(2))
    rewards = torch.randn(P, K, generator=generator)
    known = {"sampler_token_logprobs": sampler, "loss_mask": torch.arange(P * K).view(P, K) % 3 > 0}
    reference = SecondModel(other, torch.device("cpu"), offload=False)
    return Microbatch(row, rewards, old, ref, **known), policy, reference


def trained(config: OnlineConfig, microbatch: Microbatch) -> list[Tensor]:
    """What a configuration's objective gives for a row: rates, loss, gradient, and what it moves by
    itself.
    """
    _, policy, reference = rollouts()
    objective = config.build()
    objective.reference_values = reference.map_rows
    objective.add_to(policy)
    scaled = replace(microbatch, rewards=objective.scaler(microbatch.rewards))
    ((prepared,),) = objective.prepare(policy, [[scaled]], lambda sums: sums)
    if "old_values" in prepared.prepared:  # as if the critic had moved since
        far = 20 * torch.linspace(-1, 1, len(microbatch.row.labels))
        prepared = replace(prepared, prepared={**prepared.prepared, "old_values": far})
    loss, _ = objective.loss(
        policy, prepared, objective.divisor(microbatch.row, microbatch.loss_mask)
    )
    weights = [weight for weight in policy.parameters() if weight.requires_grad]
    gradients = torch.autograd.grad(loss, weights, materialize_grads=True)
    before = [weight.detach().clone() for weight in weights]
    objective.conclude(policy, [[prepared]], lambda sums: sums)
    after = [weight.detach().clone() for weight in weights]
    with torch.no_grad():
        for weight, then in zip(weights, before, strict=True):
            weight.copy_(then)
    if hasattr(policy, "critic"):
        del policy.critic
    return [torch.tensor([*objective.learning_rates.values()]), loss.detach(), *gradients, *after]


@pytest.mark.parametrize("name", OBJECTIVES)
def test_each_option_of_an_objective_changes_what_it_trains_or_is_refused(name):
    """Those that belong to its loss. What belongs to the loop works for each objective."""
    microbatch = rollouts()[0]
    assert (
        without_effect(OBJECTIVES[name], OnlineConfig, lambda config: trained(config, microbatch))
        == []
    )


def optimized(config: OnlineConfig, microbatch: Microbatch) -> list[Tensor]:
    """Weights of policy and critic after three steps of nine, and what the objective moves."""
    policy = deepcopy(rollouts()[1])
    objective = config.build()
    objective.reference_values = rollouts()[2].map_rows
    objective.add_to(policy)
    ((prepared,),) = objective.prepare(policy, [[microbatch]], lambda sums: sums)
    fp32 = choose_precision("fp32", "fp32")
    rates = objective.learning_rates
    optimizer = Optimizer(Accelerator(cpu=True), policy, fp32, config, 9, rates)
    for _ in range(3):
        objective.loss(policy, prepared, 1.0)[0].backward()
        optimizer.step(torch.zeros(()))
    objective.conclude(policy, [[prepared]], lambda sums: sums)
    return [weight.detach() for weight in policy.parameters()]


@pytest.mark.parametrize(
    "name",
    [
        name if name in ORACLES else pytest.param(name, marks=pytest.mark.nightly)
        for name in OBJECTIVES
    ],
)
def test_each_option_of_the_optimizer_moves_each_objective_or_is_refused(name):
    """Where bitsandbytes is missing, its optimizer is refused when it is made."""
    microbatch, config = rollouts()[0], OBJECTIVES[name]
    plain, found = optimized(made(config, {}), microbatch), []
    for flag in fields(OptimizerConfig):
        values = [value for value in other_values(flag) if value != "adamw_8bit"]
        taken = [one for value in values if (one := made(config, {flag.name: value})) is not None]
        if taken and all(same(plain, optimized(one, microbatch)) for one in taken):
            found.append(flag.name)
    assert found == []


@pytest.mark.parametrize("name", OFFLINE_OBJECTIVES)
def test_each_option_of_fixed_preferences_changes_the_loss(name):
    config, groups = OFFLINE_OBJECTIVES[name], pairs()
    sums = kto_sums if config is KTOConfig else fixed_pair_sums
    assert (
        without_effect(config, PreferenceConfig, lambda config: [sums(config, groups)[0].detach()])
        == []
    )


def pairs() -> Groups:
    """Two pairs, or a desirable and an undesirable response."""
    logprobs, ref = -torch.arange(1.0, 9) / 8, torch.tensor([[-0.1, -1.5], [-2.0, -1.0]])
    known = {
        "ref": ref,
        "rewards": torch.tensor([[1.0, 0.0]] * 2),
        "loss_mask": torch.ones(2, 2, dtype=torch.bool),
    }
    kind = {"desirable": torch.tensor([[True], [False]]), "reference_point": torch.zeros(2, 1)}
    return Groups(logprobs, torch.arange(0, 9, 2), 2, known | kind | {"share": torch.ones(2, 1)})


# What the loop hands to losses for an option, and the objectives that refuse this option.
WITHOUT_RATIO = {name for name in OBJECTIVES if name.startswith("online_")} | {
    "copg",
    "distillation",
    "nash_md",
}
HANDED = {
    "mask_truncated": (True, set(), lambda batch: replace(batch, loss_mask=None)),
    "sampler_ratio_cap": (
        1.2,
        {"distillation", "nash_md", "trpo"},
        lambda batch: replace(batch, sampler_token_logprobs=batch.sampler_token_logprobs - 0.3),
    ),
    "old_logprobs": (
        "sampler",
        WITHOUT_RATIO | {"ppg", "reinforce", "rloo"},
        lambda batch: replace(batch, old_token_logprobs=batch.sampler_token_logprobs),
    ),
    "missing_eos_penalty": (
        1.0,
        {"distillation"},
        lambda batch: replace(batch, rewards=batch.rewards.flip(1)),
    ),
}


@pytest.mark.parametrize("option", HANDED)
def test_what_an_option_hands_to_a_loss_changes_it_or_the_option_is_refused(option):
    value, refuse, change = HANDED[option]
    microbatch = rollouts()[0]
    for name, config in OBJECTIVES.items():
        settings = {"old_logprobs": "policy", **named(config), option: value}
        if name in refuse:
            with pytest.raises(UserError, match=option):
                config(**settings)
            continue
        first, second = (
            trained(config(**settings), batch) for batch in (microbatch, change(microbatch))
        )
        assert not same(first, second), name
