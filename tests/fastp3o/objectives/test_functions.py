"""Objectives that are functions of the user's: they train as ours do, and what they must not be is
refused.
"""

import os
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

import fastp3o
from fastp3o import FunctionConfig, RLOOConfig, SAPOConfig, UserError, train
from fastp3o.calls.function import FunctionError
from fastp3o.cli import parse_chosen
from fastp3o.objectives.config.function import TENSORS
from fastp3o.objectives.config.online import OBJECTIVES
from fastp3o.run.code import code_fingerprint
from fastp3o.run.manifest import ResumeError
from fastp3o.training import build
from fastp3o_kernels import Groups, linear_loss
from tests.fastp3o.runs import (
    assert_equal,
    assert_resumes,
    config,
    metrics,
    vowels,
    weights,
    weights_of_start,
)

GIVEN = {"model": "m", "output_dir": "o", "prompts": "p", "reward": "r"}


def rloo(groups, rewards, *, scale=1.0):
    """As the objective of that name, without its KL."""
    others = (rewards.sum(1, keepdim=True) - rewards) / (rewards.shape[1] - 1)
    advantages = scale * (rewards - others)
    return -(advantages * groups.logprobs).mean(1).sum(), {
        "advantage": advantages.abs().mean(1).sum()
    }


def settings(tiny_model: str, folder: str, **changes) -> FunctionConfig:
    return config(
        tiny_model,
        folder,
        FunctionConfig,
        **{"inner_epochs": 1, "updates": 2, "save_every": 1} | changes,
    )


def random_groups(seed: int) -> Groups:
    """Two groups of four responses, whose old log-probs are others."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 7, (8,), generator=generator)
    logprobs = -torch.rand(int(lengths.sum()), generator=generator) * 3
    old = logprobs + 0.3 * torch.randn(len(logprobs), generator=generator)
    rewards, everything = torch.randn(2, 4, generator=generator), torch.ones(2, 4, dtype=torch.bool)
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    tensors = {"old_tokens": old, "rewards": rewards, "loss_mask": everything}
    return Groups(logprobs.requires_grad_(), offsets, 4, tensors)


def built(function, **changes) -> FunctionConfig:
    """The checked configuration of a function, and its trial."""
    objective = fastp3o.training.api.named_objective(function)
    made = replace(FunctionConfig(**GIVEN), objective=objective, **changes)
    made.check_complete()
    made.build()
    return made


# --- runs -----------------------------------------------------------------------------------------


def test_a_function_trains_to_the_bits_of_the_objective_that_it_is(tiny_model, workplace):
    train(settings(tiny_model, "function"), objective=rloo)
    own = config(tiny_model, "own", RLOOConfig, kl_coef=0.0, inner_epochs=1, updates=2)
    train(own)
    assert_equal(weights("function"), weights("own"))
    both = zip(metrics("function"), metrics("own"), strict=True)
    assert all(one.pop("loss/advantage") > 0 and one == other for one, other in both)


def test_the_command_trains_with_a_function_to_the_same_bits_and_resumes(
    tiny_model, workplace, monkeypatch
):
    monkeypatch.syspath_prepend(Path(__file__).parents[3])
    run = settings(tiny_model, "run", objective=f"{__name__}:rloo")
    train(run)
    assert_resumes(run)
    train(settings(tiny_model, "python"), objective=rloo)
    assert_equal(weights("run"), weights("python"))


def test_a_run_resumes_with_the_same_code_alone(tiny_model, workplace):
    def weighed(weight):
        def loss(groups, rewards):
            return -(weight * (rewards - rewards.mean(1, keepdim=True)) * groups.logprobs).sum()

        return loss

    def unlike(groups, rewards):
        return -(2 * (rewards - rewards.mean(1, keepdim=True)) * groups.logprobs).sum()

    train(settings(tiny_model, "run"), objective=weighed(1.0))
    again = settings(tiny_model, "run", resume=True, updates=3)
    with pytest.raises(
        ResumeError, match=r"the content has changed since the run began: --objective \(.*weighed"
    ):
        train(again, objective=weighed(2.0))
    with pytest.raises(
        ResumeError, match=r"a different run: --objective \(.*weighed.* before, .*unlike now\)"
    ):
        train(again, objective=unlike)
    train(again, objective=weighed(1.0))
    assert len(metrics("run")) == 3


def sapo(groups, old_tokens, rewards, *, tau_pos=1.0, tau_neg=1.05):
    """arXiv 2511.20347, once more."""
    advantages = groups.per_token(
        (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
    )
    tau = torch.where(advantages > 0, tau_pos, tau_neg)
    gates = torch.sigmoid(tau * ((groups.token_logprobs - old_tokens).exp() - 1)) * 4 / tau
    return -groups.means(advantages * gates).mean(1).sum()


def test_an_objective_of_the_tree_and_its_function_have_equal_losses_gradients_and_weights(
    tiny_model, workplace
):
    steps = {"updates": 3, "prompts_per_minibatch": 4, "inner_epochs": 2}
    train(settings(tiny_model, "function", **steps), objective=partial(sapo, tau_neg=2.0))
    train(config(tiny_model, "tree", SAPOConfig, tau_neg=2.0, **steps))
    for one, other in zip(metrics("function"), metrics("tree"), strict=True):
        assert other["ratio_mean"] != 1
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-4, abs=1e-6)
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-4)
    start, tree = weights_of_start(tiny_model), weights("tree")
    for name, weight in weights("function").items():
        moved = (tree[name] - start[name]).norm()
        assert (weight - tree[name]).norm() < 0.01 * moved


@pytest.mark.parametrize("seed", range(3))
def test_an_objective_of_the_tree_and_its_function_have_equal_gradients(seed):
    groups = random_groups(seed)
    tree = SAPOConfig(**GIVEN).build()
    (one,), (other,) = (
        torch.autograd.grad(loss, groups.token_logprobs)
        for loss in (tree.sums(groups)[0], sapo(groups, groups["old_tokens"], groups["rewards"]))
    )
    torch.testing.assert_close(one, other)
    assert one.abs().min() > 0


def test_the_same_function_goes_into_a_loop_without_the_trainer():
    """As the page says: `linear_loss` gives a function what its caller names."""
    groups = random_groups(1)
    generator = torch.Generator().manual_seed(2)
    hidden = torch.randn(len(groups.token_logprobs), 8, generator=generator, requires_grad=True)
    weight = torch.randn(32, 8, generator=generator)
    loss = linear_loss(
        hidden,
        weight,
        torch.randint(32, (len(hidden),), generator=generator),
        groups.cu_seqlens,
        lambda chunk: sapo(chunk, **chunk.tensors),
        responses_per_group=4,
        token_tensors={"old_tokens": groups["old_tokens"]},
        response_tensors={"rewards": groups["rewards"]},
    ).loss
    (gradient,) = torch.autograd.grad(loss, hidden)
    assert gradient.abs().sum() > 0


def test_a_function_that_fails_in_a_run_leaves_the_model_and_says_where(tiny_model, workplace):
    def fails_later(groups, rewards):
        if Path("run/metrics.jsonl").exists():
            raise RuntimeError("lost")
        return (rewards * groups.logprobs).sum()

    with pytest.raises(
        FunctionError,
        match=r"update 2: the objective .*fails_later failed: .*, line \d+: RuntimeErr",
    ) as told:
        train(settings(tiny_model, "run"), objective=fails_later)
    assert isinstance(told.value.__cause__, RuntimeError)
    assert Path("run/stopped-in-000002").exists()


# --- what a function gets -------------------------------------------------------------------------


def test_a_function_gets_what_it_names_and_nothing_else(tiny_model, workplace):
    seen = []

    def named(groups, ref, entropy, old_tokens, tau=3.0):
        seen.append({*groups.tensors})
        assert tau == 3.0
        assert torch.equal(groups["ref"], ref)
        assert entropy is groups.entropy
        assert old_tokens.shape == groups.token_logprobs.shape
        return groups.logprobs.sum()

    train(settings(tiny_model, "run", updates=1), objective=named)
    assert seen
    assert all(names == {"ref", "old_tokens"} for names in seen)
    with pytest.raises(
        FunctionError, match=r"no tensor 'ref' .*given: none.*; it has the tensors that its"
    ):
        built(lambda groups: (groups["ref"] * groups.logprobs).sum())


@pytest.mark.parametrize("name", ["ref", "ref_tokens", "old"])
def test_a_reference_is_loaded_where_the_function_names_it(
    tiny_model, workplace, name, monkeypatch
):
    loaded = []
    load = build.load_reference_model
    monkeypatch.setattr(
        build, "load_reference_model", lambda *arguments: loaded.append(1) or load(*arguments)
    )
    bodies = {
        "ref": lambda groups, ref: (groups.logprobs - ref).square().sum(),
        "ref_tokens": lambda groups, ref_tokens: (
            (groups.token_logprobs - ref_tokens).square().sum()
        ),
        "old": lambda groups, old: (groups.logprobs - old).square().sum(),
    }
    train(settings(tiny_model, "run", updates=1), objective=bodies[name])
    assert bool(loaded) == name.startswith("ref") == ("kl" in metrics("run")[0])


def test_a_function_may_weigh_what_sampled(tiny_model, workplace):
    ratios = []

    def weighed(groups, old_tokens, sampler_tokens):
        ratios.append((old_tokens - sampler_tokens).exp())
        return -(ratios[-1] * groups.token_logprobs).sum()

    train(settings(tiny_model, "run", updates=1, top_p=0.9, save_every=0), objective=weighed)
    # each token was likelier where the unlikely ones were cut off
    assert torch.cat(ratios[3:]).max() < 1 - 1e-3


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (
            lambda groups, reward: groups.logprobs.sum(),
            f"there is no reward: .* among {', '.join(TENSORS)}",
        ),
        (lambda groups, **tensors: groups.logprobs.sum(), r"there is no \*\*tensors"),
        (lambda rewards, old: rewards.sum(), "must take groups of responses first"),
        (lambda: 0, "must take groups of responses first"),
        (
            lambda groups: groups.logprobs,
            r"the loss of .* must be a 0-d tensor, got one of shape \[1|2, 4\]",
        ),
        (lambda groups: 1.5, "the loss of .* must be a 0-d tensor, got 1.5"),
        (lambda groups: groups.logprobs.sum().detach(), "has no gradient"),
        (lambda groups: groups.logprobs.sum() * torch.inf, "the loss of .* is -inf for"),
        (
            lambda groups: groups.logprobs.mean(),
            r"the loss of .* must be a sum over its groups.* End in \.sum\(\)",
        ),
        (
            lambda groups, rewards: -((rewards - rewards.mean()) * groups.logprobs).sum(),
            "must be a sum over its groups.* compare within a group alone",
        ),
        (
            lambda groups: (groups.logprobs.sum(), {"a": 1.0}),
            "the metric 'a' of .* must be a 0-d tensor, got 1.0",
        ),
        (
            lambda groups: (groups.logprobs.sum(), {"a": groups.logprobs.mean()}),
            "the metric 'a' of .* must be a sum",
        ),
        (
            lambda groups: (groups.logprobs.sum(), {"a_max": groups.logprobs.max()}),
            "'a_max', and metrics are sums",
        ),
        (lambda groups: groups.nothing, "failed: .*test_functions.py, line .*: AttributeError"),
        (
            torch.nn.Linear(1, 1),
            "must be a function of groups, or functools.partial of one, got a Linear",
        ),
    ],
)
def test_what_breaks_the_contract_is_refused_before_anything_is_loaded(function, message):
    with pytest.raises(UserError, match=message):
        built(function)


@pytest.mark.parametrize(
    ("changes", "needed"),
    [
        ({"mask_truncated": True}, "takes loss_mask"),
        ({"reward_scaling": "none"}, "takes rewards"),
        ({"length_penalty": 0.1}, "takes rewards"),
        ({"dynamic_sampling": 2}, "takes rewards"),
        ({"sampler_ratio_cap": 2.0}, "an objective of fastp3o: a function takes sampler_tokens"),
    ],
)
def test_options_without_effect_on_a_function_are_refused(changes, needed):
    (option,) = changes
    with pytest.raises(UserError, match=f"{option} has no effect without .*{needed}"):
        built(lambda groups: groups.logprobs.sum(), **changes)
    if option != "sampler_ratio_cap":
        built(
            lambda groups, loss_mask, rewards: (rewards * loss_mask * groups.logprobs).sum(),
            **changes,
        )


def test_ratios_to_what_sampled_need_a_function_with_ratios():
    changes = {"old_logprobs": "sampler"}
    FunctionConfig(**GIVEN, **changes)  # whose function comes later
    built(lambda groups, old: (groups.logprobs - old).square().sum(), **changes)
    with pytest.raises(UserError, match="old_logprobs sampler changes no ratio"):
        built(lambda groups: groups.logprobs.sum(), **changes)
    with pytest.raises(UserError, match="sampler transformers gives none"):
        built(lambda groups, sampler_tokens: groups.logprobs.sum(), sampler="transformers")


def test_an_objective_of_ours_takes_no_function():
    with pytest.raises(
        UserError, match="goes with a FunctionConfig, and RLOOConfig has an objective"
    ):
        train(RLOOConfig(**GIVEN), objective=rloo)
    with pytest.raises(UserError, match="objective is missing"):
        train(FunctionConfig(**GIVEN))


def test_lines_of_the_log_have_the_function_s_name():
    made = replace(FunctionConfig(**GIVEN), objective=fastp3o.training.api.named_objective(rloo))
    assert (made.build().label, OBJECTIVES["p3o"](**GIVEN).build().label) == ("rloo", "P3O")


def test_the_command_tells_functions_from_objectives(workplace, capsys):
    Path("mine.py").write_text(
        "def loss(groups, rewards):\n    return (rewards * groups.logprobs).sum()\n"
    )
    flags = [f"--{name}={value}" for name, value in GIVEN.items()]
    made = parse_chosen(
        OBJECTIVES, ["--objective", "mine:loss", *flags], of_function=FunctionConfig
    )
    assert (type(made), made.tensors) == (FunctionConfig, ("rewards",))
    for name, message in (
        ("mine:lost", "the nearest one is loss"),
        ("mine", ", module:function)"),
        ("mine.loss", ", module:function); a function is mine:loss"),
    ):
        with pytest.raises(SystemExit):
            parse_chosen(OBJECTIVES, ["--objective", name, *flags], of_function=FunctionConfig)
        assert message in capsys.readouterr().err
    with pytest.raises(SystemExit):
        parse_chosen(OBJECTIVES, ["--help"], of_function=FunctionConfig)
    assert "  module:function An objective that is a function" in capsys.readouterr().out


# --- the hash of a function's code ----------------------------------------------------------------

MODULE = """
TAU = 1.0
UNREAD = 1
WEIGHTS = [1.0, 2.0]

def gate(x):
    return [TAU * x for _ in WEIGHTS]

def loss(groups, power=2):
    return gate(groups)
"""


@pytest.mark.parametrize(
    ("before", "after", "same"),
    [
        ("UNREAD = 1", "UNREAD = 2", True),
        ("TAU = 1.0", "TAU = 1.5", False),
        ("2.0]", "3.0]", False),
        ("TAU * x", "x * TAU", False),
        ("power=2", "power=3", False),
        ("return gate", "return  gate", False),
    ],
)
def test_code_is_what_a_function_reads(workplace, before, after, same):
    def hashed(name: str, text: str) -> str:
        Path(f"{name}.py").write_text(text)
        namespace = {"__name__": "mine"}
        exec(compile(text, str(Path(f"{name}.py").absolute()), "exec"), namespace)
        return code_fingerprint(namespace["loss"])

    assert before in MODULE
    first = hashed("first", MODULE)
    assert first == hashed("again", MODULE)
    assert (hashed("second", MODULE.replace(before, after)) == first) is same


def test_each_process_finds_the_same_code(workplace):
    """Whatever it hashes texts with, and where its objects lie."""
    text = MODULE.replace(
        "return gate(groups)", "return gate(groups), groups in {'a', 'b', 'c'}, LAST"
    )
    text += "\nLAST = {'d', 'e', 'f'}, object(), print\nloss_of = lambda x: x in {'a', 'b', 'c'}\n"
    Path("mine.py").write_text(text)
    command = "import mine, fastp3o.run.code as code; print(*map(code.code_fingerprint, (mine.loss, mine.loss_of)))"
    found = [
        subprocess.run(
            [sys.executable, "-c", command],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
        )
        for seed in ("1", "2")
    ]
    assert found[0].stdout == found[1].stdout != b""


def test_values_that_a_function_closes_over_are_its_code():
    def of(value):
        return code_fingerprint(lambda groups: value)

    assert (
        of(torch.tensor([1.0, 2.0])) == of(torch.tensor([1.0, 2.0])) != of(torch.tensor([1.0, 3.0]))
    )
    assert of(object()) == of(object())  # an address is no value
    assert of({"one", "two"}) != of({"one", "three"})
    assert of({"a": [1]}) != of({"a": [2]})
    assert code_fingerprint(partial(rloo, scale=1.0)) != code_fingerprint(partial(rloo, scale=2.0))
    assert code_fingerprint(lambda groups: 1.0 * groups) != code_fingerprint(
        lambda groups: 2.0 * groups
    )
    assert code_fingerprint(lambda groups: groups.a) != code_fingerprint(lambda groups: groups.b)
    recursive = [rloo]
    recursive.append(recursive)
    assert of(recursive) == of(recursive)


def test_rewards_that_are_read_are_needed(tiny_model, workplace):
    train(
        settings(tiny_model, "run", reward="", prompts="", updates=1),
        objective=rloo,
        reward=vowels,
        prompts="prompts.jsonl",
    )
    assert metrics("run")[0]["loss/advantage"] > 0


def test_the_page_begins_with_a_function_that_trains(tiny_model, workplace):
    page = (Path(fastp3o.__file__).parent / "objectives" / "README.md").read_text()
    code = page.partition("```python\n")[2].partition("```")[0]
    assert page.index(code) < page.index("\n## Offline")
    assert len(code.splitlines()) <= 12
    small = 'output_dir="runs/gated", updates=1, prompts_per_update=8, max_response_tokens=6, report_to="none"'
    for name, instead in (
        ("runs/sft/model", tiny_model),
        ("p.jsonl", "prompts.jsonl"),
        ("my_reward:score", "rewards_for_tests:vowels"),
        ('output_dir="runs/gated"', small),
    ):
        assert code.count(name) == 1
        code = code.replace(name, instead)
    exec(compile(code, "README.md", "exec"), {"__name__": "page"})
    assert metrics("runs/gated")[0]["grad_norm"] > 0
