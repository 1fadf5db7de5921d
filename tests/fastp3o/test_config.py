import re
import runpy
import sys
from dataclasses import fields, is_dataclass
from typing import get_args

import numpy as np
import pytest
import torch
from transformers import SchedulerType, get_scheduler

from fastp3o.cli import __file__ as cli_file
from fastp3o.cli import parse, parse_chosen
from fastp3o.config import Flags, ScheduleName, conditions, objective_name, option, options
from fastp3o.errors import UserError
from fastp3o.objectives.p3o import P3OConfig, PPGConfig
from fastp3o.objectives.policy_gradient import (
    DAPOConfig,
    DrGRPOConfig,
    GRPOConfig,
    GSPOConfig,
    REINFORCEConfig,
    RLOOConfig,
)
from fastp3o.objectives.ppo import PPOConfig
from fastp3o.objectives.preferences import OFFLINE_OBJECTIVES, DPOConfig
from fastp3o.training.config import RewardModelConfig
from fastp3o.training.sft import SFTConfig
from fastp3o.trl_names import TRL_NAMES, hint

CONFIGS = {
    config.__name__: config
    for config in (P3OConfig, PPGConfig, PPOConfig, GRPOConfig, SFTConfig, *OFFLINE_OBJECTIVES.values())
}
P3O = ["--model", "m", "--output_dir", "o", "--prompts", "p", "--reward", "r"]


def test_flags_set_fields():
    config = parse(P3OConfig, [*P3O, "--kl_coef", "0.1", "--clipping", "separate", "--resume"])
    assert (config.kl_coef, config.clipping, config.resume) == (0.1, "separate", True)


def test_a_yaml_file_sets_fields_and_flags_override_it(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("model: m\noutput_dir: o\nprompts: p\nreward: r\nlearning_rate: 1e-4\nkl_coef: 0.2\n")
    config = parse(P3OConfig, [str(path), "--kl_coef", "0.3"])
    assert (config.learning_rate, config.kl_coef) == (1e-4, 0.3)


@pytest.mark.parametrize("chosen", CONFIGS.values(), ids=CONFIGS)
def test_a_flag_that_is_declared_again_stays_changeable_and_needs_flags_that_exist(chosen):
    for flag in fields(chosen):
        for base in chosen.__mro__[1:]:
            inherited = {field.name: field for field in fields(base)} if is_dataclass(base) else {}
            if flag.name in inherited and inherited[flag.name].metadata.get("changeable"):
                assert flag.metadata.get("changeable"), flag.name
        needs = {need.flag for need in conditions(flag.metadata.get("needs", ()))}
        assert not needs or {name.name for name in fields(chosen)} & needs, flag.name


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("updates", "3", "an integer"),
        ("updates", 2.5, "an integer"),
        ("updates", None, "an integer"),
        ("seed", True, "an integer"),
        ("learning_rate", "1e-5", "a number"),
        ("resume", "no", "True or False"),
        ("precision", None, "text"),
        ("prompts", [1.0], "text"),
    ],
)
def test_a_value_of_another_type_is_refused_in_python(name, value, expected):
    with pytest.raises(UserError, match=re.escape(f"--{name} must be {expected}, got {value!r}")):
        P3OConfig(**{"model": "m", "output_dir": "o", name: value})


def test_numbers_of_numpy_paths_and_enums_become_what_yaml_holds(tmp_path):
    odd = {"updates": np.int64(3), "learning_rate": np.float32(0.25), "lr_schedule": SchedulerType.COSINE}
    config = P3OConfig(model="m", output_dir=tmp_path, temperature=np.float64(0.5), **odd)
    got = [config.updates, config.learning_rate, config.lr_schedule, config.temperature, config.output_dir]
    assert got == [3, 0.25, "cosine", 0.5, str(tmp_path)]
    assert [type(value) for value in got] == [int, float, str, float, str]
    with pytest.raises(UserError, match="--temperature must be a finite number"):
        P3OConfig(model="m", output_dir="o", temperature=np.float32("nan"))


def test_a_configuration_shows_its_own_options_first_and_those_of_a_run_last(capsys):
    names = [flag.name for flag in fields(P3OConfig)]
    assert names[:5] == ["clipping", "clip_range", "ratio_cap", "kl_coef", "kl_reward"]
    order = ("temperature", "reward", "weight_decay", "max_prompt_tokens", "model", "eval_every", "output_dir")
    assert [name for name in names if name in order] == list(order)
    with pytest.raises(SystemExit):
        parse(P3OConfig, ["--help"])
    shown = re.findall(r"^  --(\w+)", capsys.readouterr().out, re.MULTILINE)
    assert [name for name in shown if name in names] == names


def test_help_says_the_bounds(capsys):
    with pytest.raises(SystemExit):
        parse(P3OConfig, ["--help"])
    said = " ".join(capsys.readouterr().out.split())
    assert "(at least 0 and below 1; default: 0.9)" in said
    assert "(0 or more; default: 0)" in said


def test_evaluations_come_regularly_at_given_updates_and_last():
    config = parse(
        P3OConfig, [*P3O, "--eval_prompts", "e", "--eval_at", "1, 3", "--eval_every", "4", "--updates", "10"]
    )
    assert [update for update in range(1, 11) if config.evaluates_after(update, last=10)] == [1, 3, 4, 8, 10]


def test_every_schedule_warms_up_from_the_flags_alone():
    parameter = torch.nn.Parameter(torch.zeros(1))
    for name in get_args(ScheduleName):
        name = "constant_with_warmup" if name == "constant" else name
        schedule = get_scheduler(name, torch.optim.SGD([parameter], 1.0), num_warmup_steps=2, num_training_steps=4)
        assert schedule.get_last_lr() == [0.0]


def test_yaml_values_are_taken_as_they_are_written(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(
        "model: 1e5\noutput_dir: 2026-01-01\nprompts: 12:30\nreward: -x\neval_at: ''\nresume: yes\nseed: 010\n"
    )
    config = parse(P3OConfig, [str(path)])
    assert (config.model, config.output_dir, config.prompts, config.reward) == ("1e5", "2026-01-01", "12:30", "-x")
    assert (config.eval_at, config.resume, config.seed) == ("", True, 10)


@options
class Red(Flags):
    """Trains red."""

    objective: str = objective_name("red")
    depth: int = option(1, "Of red.")


@options
class Blue(Flags):
    """Trains blue."""

    objective: str = objective_name("blue")
    tone: str = option("sky", "Of blue.")


COLOURS = {"red": Red, "blue": Blue}


def test_the_objective_chooses_the_configuration(tmp_path):
    assert parse_chosen(COLOURS, ["--depth", "-3", "--objective", "red"]) == Red(depth=-3)
    assert parse_chosen(COLOURS, ["--objective=blue", "--tone=sea"]) == Blue(tone="sea")
    path = tmp_path / "run.yaml"
    path.write_text("objective: blue\ntone: sea\n")
    assert parse_chosen(COLOURS, [str(path), "--tone", "ink"]) == Blue(tone="ink")
    assert parse_chosen(COLOURS, [str(path), "--objective", "blue", "--objective", "blue"]) == Blue(tone="sea")
    path.write_text("objective: blue\ndepth: 2\n")
    assert parse_chosen(COLOURS, [str(path), "--objective", "red"]) == Red(depth=2)
    path.write_text("depth: 2\n")
    assert parse_chosen(COLOURS, [str(path), "--objective", "red"]) == Red(depth=2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--depth", "1"], "--objective is missing: one of red, blue"),
        (["--objective", "green"], "invalid choice: 'green'"),
        (["--objective", "red", "--tone", "sea"], "unknown option --tone"),
        (["missing.yaml", "--objective", "red"], "cannot read missing.yaml"),
    ],
)
def test_an_objective_that_is_not_there_is_refused_by_name(capsys, arguments, message):
    with pytest.raises((SystemExit, ValueError)) as error:
        parse_chosen(COLOURS, arguments)
    assert message in capsys.readouterr().err + str(error.value)


def test_a_configuration_keeps_its_objective(capsys):
    assert parse(Red, ["--objective", "red"]) == Red()
    with pytest.raises(SystemExit):
        parse(Red, ["--objective", "blue"])
    assert "--objective is red in these options, got 'blue'" in capsys.readouterr().err


def test_help_lists_the_objectives_and_explains_the_one_that_is_named(capsys):
    for arguments, expected in (([], "blue           Trains blue."), (["--objective", "blue"], "Of blue.")):
        with pytest.raises(SystemExit) as end:
            parse_chosen(COLOURS, [*arguments, "--help"])
        assert end.value.code == 0
        assert expected in capsys.readouterr().out


def test_objectives_begin_with_as_many_responses_and_steps_as_their_losses_need():
    settings = {"model": "m", "output_dir": "o", "prompts": "p", "reward": "r"}
    assert P3OConfig(**settings).responses_per_prompt == 2
    for clipped in (GRPOConfig, DAPOConfig, GSPOConfig):
        assert clipped(**settings).responses_per_prompt == 8
    for on_policy in (RLOOConfig, REINFORCEConfig, PPGConfig):
        config = on_policy(**settings)
        assert config.minibatches_per_update == config.inner_epochs == 1
    assert P3OConfig(**settings, prompts_per_minibatch=0).prompts_per_minibatch == 64


def test_a_missing_package_of_the_trainer_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install '\.\[trainer\]'"):
        runpy.run_path(cli_file)


@pytest.mark.parametrize(
    ("config", "name", "said"),
    [
        (P3OConfig, "beta", "TRL's beta is --kl_coef here"),
        (P3OConfig, "num_generations", "TRL's num_generations is --responses_per_prompt here"),
        (P3OConfig, "epsilon", "TRL's epsilon is --clip_range here"),
        (GRPOConfig, "epsilon", "TRL's epsilon is --clip_low here"),
        (P3OConfig, "bf16", "TRL's bf16 is --precision bf16-autocast here"),
        (SFTConfig, "per_device_train_batch_size", "TRL's per_device_train_batch_size is --batch_size here"),
        (P3OConfig, "repetition_penalty", "no samples of the policy. ngram_penalty lowers the reward"),
        (P3OConfig, "gradient_accumulation_steps", "is nothing to set: rows of tokens_per_row"),
        (P3OConfig, "update", "the nearest one is --updates"),
        (SFTConfig, "num_generations", "unknown option"),
    ],
)
def test_trls_names_are_hints_in_commands_and_in_python(config, name, said, capsys):
    complete = [f"--{flag.name}=x" for flag in fields(config) if flag.metadata.get("required")]
    with pytest.raises(SystemExit):
        parse(config, [*complete, f"--{name}=1"])
    line = capsys.readouterr().err.splitlines()[-1]
    assert said in line
    with pytest.raises(TypeError) as refused:
        config(**{name: 1})
    expected = said.replace("--", "").replace("unknown option", f"{config.__name__} has no option {name}")
    assert expected in str(refused.value)
    assert "TRL's" in line or name in ("update", "num_generations")


def test_every_hint_names_an_option_that_there_is():
    options = {
        flag.name
        for kind in (P3OConfig, GRPOConfig, PPOConfig, SFTConfig, DPOConfig, RewardModelConfig)
        for flag in fields(kind)
    }
    for name, choices in TRL_NAMES.items():
        assert all(choice.split()[0].rstrip(",") in options or ":" in choice for choice in choices), name
        assert hint(name, options) or name in options, name
    assert hint("nosuch", options) == ""


def test_help_shows_one_spelling_and_no_default_of_what_is_required(capsys):
    with pytest.raises(SystemExit):
        parse(P3OConfig, ["--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "--learning-rate" not in text
    assert "--output_dir OUTPUT_DIR Folder of the run: what it makes, and what --resume needs. --" in text
    config = parse(P3OConfig, ["--model=m", "--prompts=p", "--reward=r", "--output-dir", "o", "--learning-rate=1e-3"])
    assert (config.output_dir, config.learning_rate) == ("o", 1e-3)


@pytest.mark.parametrize(
    ("kind", "prompts", "minibatches"),
    [
        (GRPOConfig, 64, 1),
        (DrGRPOConfig, 64, 1),
        (DAPOConfig, 64, 16),
        (DAPOConfig, 24, 8),
        (GSPOConfig, 64, 4),
        (GSPOConfig, 5, 1),
    ],
)
def test_group_objectives_make_their_papers_steps(kind, prompts, minibatches):
    config = kind(model="m", output_dir="o", prompts="p", reward="r", prompts_per_update=prompts)
    assert (config.minibatches_per_update, config.inner_epochs) == (minibatches, 1)


def test_python_may_have_lists_and_objects_where_commands_have_text():
    plain = {"model": "m", "output_dir": "o", "prompts": "p", "reward": "a:f,b:g"}
    config = P3OConfig(
        **plain, reward_weights=[0.5, 2], reward_columns=("answer",), chat_template_kwargs={"enable_thinking": False}
    )
    assert (config.reward_weights, config.reward_columns) == ("0.5,2", "answer")
    assert config.reading["chat_template_kwargs"] == {"enable_thinking": False}
    assert P3OConfig(**plain, **{"reward_weights": "0.5,2"}).weights == config.weights
    wrong = {"output_dir": ["a"], "reward": ["a:f"], "report_to": {"a": 1}, "chat_template_kwargs": [1]}
    for name, value in wrong.items():
        with pytest.raises(UserError, match=f"{name} must be"):
            P3OConfig(**(plain | {name: value}))


def test_help_in_python_says_what_every_option_means():
    assert "num_generations" not in P3OConfig.__doc__
    assert all(f"    {flag.name} (default" in P3OConfig.__doc__ for flag in fields(P3OConfig))
    assert "Options:" not in P3OConfig.summary
    assert "Options:" not in RewardModelConfig.summary
