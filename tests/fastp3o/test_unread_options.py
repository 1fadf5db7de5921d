"""An option that a run reads nowhere is refused there: nobody sets a value that is ignored."""

import sys
from collections.abc import Callable
from dataclasses import Field, fields
from typing import Any, get_type_hints

import pytest

from fastp3o import train
from fastp3o.commands import evaluate, win_rate
from fastp3o.config import Flags, broken_rule, field_type
from fastp3o.errors import UserError
from fastp3o.evaluation.config import EvaluateConfig, WinRateConfig
from fastp3o.generate.config import GenerateConfig
from fastp3o.generate.loop import generate
from fastp3o.objectives.config.online import OBJECTIVES
from fastp3o.objectives.config.preferences import OFFLINE_OBJECTIVES
from fastp3o.training.config import RewardModelConfig, SFTConfig

SAMPLED = {
    "prompts": "prompts.jsonl",
    "reward": "rewards_for_tests:varied",
    "max_response_tokens": 4,
}
SHORT = {"precision": "fp32", "report_to": "none", "output_dir": "run"}
ONLINE = SHORT | SAMPLED | {"updates": 2, "prompts_per_update": 2}
FIXED = SHORT | {"max_response_tokens": 16, "batch_size": 4}
EVALUATED = {"eval_prompts": "prompts.jsonl", "eval_limit": 1}


def flags_of(config: Flags) -> list[str]:
    return [part for name, value in config.named.items() for part in (f"--{name}", str(value))]


def command(main: Callable[[], None]) -> Callable[[Flags], None]:
    def run(config: Flags) -> None:
        with pytest.MonkeyPatch.context() as monkeypatch:
            monkeypatch.setattr(sys, "argv", ["fastp3o", *flags_of(config)])
            main()

    return run


def offline(objective: str, **further: Any) -> Any:
    data = "unpaired.jsonl" if objective == "kto" else "preferences.jsonl"
    return OFFLINE_OBJECTIVES[objective], FIXED | {"train_data": data} | further, train


# The configuration of a run, its options beside the model, and what runs it.
RUNS = {name: (config, ONLINE, train) for name, config in OBJECTIVES.items()}
RUNS |= {name: offline(name) for name in OFFLINE_OBJECTIVES}
RUNS |= {
    "p3o, evaluated": (OBJECTIVES["p3o"], ONLINE | EVALUATED, train),
    "p3o, LoRA": (OBJECTIVES["p3o"], ONLINE | {"lora_rank": 2}, train),
    "dpo, evaluated": offline("dpo", **EVALUATED),
    "sft": (SFTConfig, FIXED | {"train_data": "sft.jsonl"}, train),
    "reward": (RewardModelConfig, FIXED | {"train_data": "preferences.jsonl"}, train),
    "generate": (GenerateConfig, SAMPLED | {"output_dir": "run"}, generate),
    "evaluate": (EvaluateConfig, SAMPLED, command(evaluate.main)),
    "win_rate": (WinRateConfig, SAMPLED, command(win_rate.main)),
}
ALWAYS = {"p3o", "trpo", "kto", "dpo, evaluated", "sft", "reward", "generate", "win_rate"}


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The options that something has read, other than a configuration's own checks. An objective's
    name chooses the configuration.
    """
    names = {"objective"}

    def get(config: Flags, name: str) -> Any:
        if name in type(config).__dataclass_fields__ and not checks(sys._getframe(1)):
            names.add(name)
        return object.__getattribute__(config, name)

    monkeypatch.setattr(Flags, "__getattribute__", get, raising=False)
    return names


CHECKS = {"__post_init__", "check_needs", "check_complete", "derived", "values", "with_values"}


def checks(frame: Any) -> bool:
    """Whether a configuration reads its option, in the frame, for a check or for a copy."""
    while frame is not None and "config" in frame.f_globals["__name__"]:
        if frame.f_code.co_name in CHECKS:
            return True
        frame = frame.f_back
    return False


def other_value(config: type[Flags], flag: Field) -> Any:
    """A value that an option may have and that is not its default."""
    kind = field_type(get_type_hints(config)[flag.name])
    if choices := flag.metadata.get("choices"):
        values = list(choices)
    elif kind is bool:
        values = [not flag.default]
    elif kind is str:
        values = ["[]" if flag.metadata.get("python") is dict else "other"]
    else:
        start = flag.default or 0
        values = [kind(value) for value in (start + 1, start / 2, 0.5)]
    return next(
        value for value in values if value != flag.default and not broken_rule(value, flag.metadata)
    )


@pytest.mark.parametrize(
    "name",
    [name if name in ALWAYS else pytest.param(name, marks=pytest.mark.nightly) for name in RUNS],
)
def test_an_option_that_a_run_does_not_read_is_refused(name, workplace, tiny_model, read):
    config, settings, run = RUNS[name]
    (workplace / "other").symlink_to(tiny_model)
    model = {"model": tiny_model}
    if config is WinRateConfig:
        model = {"models": f"{tiny_model},other"}
    run(config(**model, **settings))
    unread = [flag for flag in fields(config) if flag.name not in read]
    assert {"vllm_folder", "verdicts", "lora_alpha"} & {flag.name for flag in unread}
    ignored = []
    for flag in unread:
        changed = model | settings | {flag.name: other_value(config, flag)}
        try:
            config(**changed).check_complete()
        except UserError as error:
            if "no effect" in str(error):
                continue
        ignored.append(flag.name)
    assert ignored == []
