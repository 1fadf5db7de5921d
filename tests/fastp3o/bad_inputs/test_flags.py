"""Every rule of every flag, as its field states it: at a bound it is taken, beyond it is refused by
name. Odd values of every flag are refused in one line or taken as they read.
"""

import shlex
from dataclasses import Field, fields, replace
from typing import Any, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastp3o.config import Flags, bounds, broken_rule, conditions, field_type
from fastp3o.errors import UserError
from tests.fastp3o.bad_inputs.working import CONFIGS, WORKING, configure, fuzz

# Steps from a bound that are taken, and refused.
BOUNDS = {"above": (1e-9, 0), "at_least": (0, -1), "below": (-1e-9, 0), "at_most": (0, 1)}
# A configuration that works for each script, and for each objective of those that have several.
EVERY = {
    f"{script} {chosen}": configure(script, shlex.split(WORKING[script] + chosen))
    for script, kind in CONFIGS.items()
    for chosen in ([f" --objective {name}" for name in kind] if isinstance(kind, dict) else [""])
}


def refusal(config: Flags, name: str, value: Any) -> str:
    """The error for one other value; "" if it is taken."""
    try:
        replace(config, **{name: value}).check_complete()
    except UserError as error:
        return str(error)
    return ""


def numbers(config: Flags) -> list[tuple[Field, type]]:
    hints = get_type_hints(type(config))
    return [
        (flag, kind)
        for flag in fields(config)
        if (kind := field_type(hints[flag.name])) in (int, float)
    ]


@pytest.mark.parametrize("name", EVERY)
def test_a_number_beyond_its_bounds_is_refused_and_one_at_them_taken(name: str):
    config = EVERY[name]
    for flag, kind in numbers(config):
        for rule, (taken, refused) in BOUNDS.items():
            if rule in flag.metadata:
                bound = flag.metadata[rule]
                step = 1 if kind is int and rule in ("above", "below") else taken
                inside = refusal(
                    config,
                    flag.name,
                    kind(bound + (-1 if rule == "below" and kind is int else step)),
                )
                assert not inside.startswith(
                    f"--{flag.name} must be {bounds(flag.metadata)}, got"
                ), inside
                wrong = refusal(config, flag.name, kind(bound + refused))
                assert wrong.startswith(f"--{flag.name} must be {bounds(flag.metadata)}, got"), (
                    wrong
                )
        for value in (float("nan"), float("inf"), 10**30) if kind is float else (10**30,):
            assert refusal(config, flag.name, value).startswith(f"--{flag.name} must be")


def test_every_number_has_bounds_but_these():
    every = [flag for config in EVERY.values() for flag, _ in numbers(config)]
    assert {flag.name for flag in every if not bounds(flag.metadata)} == {"threshold"}


@pytest.mark.parametrize("name", EVERY)
def test_other_choices_and_flags_without_what_they_need_are_refused_and_what_is_required_must_come(
    name: str,
):
    config = EVERY[name]
    hints, flags = get_type_hints(type(config)), {flag.name: flag for flag in fields(config)}
    for flag in flags.values():
        if "choices" in flag.metadata:
            assert refusal(config, flag.name, "nosuch").startswith(f"--{flag.name} must be one of ")
        if flag.metadata.get("required"):
            assert refusal(config, flag.name, "").startswith(f"--{flag.name} is missing")
    needs = [(flag, flags[flag].metadata.get("needs", ())) for flag in flags] + [
        *config.further_needs.items()
    ]
    for flag, needed in needs:
        present = [need for need in conditions(needed) if need.flag in flags]
        if (
            present
            and getattr(config, flag) == flags[flag].default
            and not any(need.holds(config) for need in present)
        ):
            said = refusal(config, flag, another(flags[flag], field_type(hints[flag])))
            assert said.startswith(f"--{flag} has no effect without "), said


def another(flag: Field, kind: type) -> Any:
    """A value that is not the default, within the flag's own rules."""
    numbers = [kind(value) for value in (0.01, 0.5, 1, 2, 3)] if kind in (int, float) else []
    candidates = flag.metadata.get("choices", [True, False] if kind is bool else [*numbers, "1"])
    return next(
        value
        for value in candidates
        if value != flag.default and not broken_rule(value, flag.metadata)
    )


ODD = (
    *(
        "",
        " ",
        "nan",
        "-inf",
        "1e400",
        "1e-400",
        "-1",
        "-0.0",
        "1",
        "1.5",
        "1e30",
        "9" * 30,
        "0x10",
        "1_000",
        "٣",
    ),
    *(
        "true",
        "None",
        "a\0b",
        "é漢",
        "\udcff",
        "[]",
        "{}",
        ",",
        "a,b",
        ":",
        "x" * 5000,
        ".",
        "models",
        "p.jsonl",
    ),
)


@pytest.mark.parametrize("script", WORKING)
def test_an_odd_value_is_refused_in_one_line_or_taken_as_it_reads(
    script: str, capsys: pytest.CaptureFixture[str]
):
    working = shlex.split(WORKING[script])

    @fuzz
    @given(st.sampled_from(fields(configure(script, working))), st.sampled_from(ODD))
    def attempt(flag: Field, value: str) -> None:
        try:
            read = getattr(configure(script, [*working, f"--{flag.name}={value}"]), flag.name)
            as_it_reads = value in ("true", "1") if isinstance(read, bool) else type(read)(value)
            rate_is_found = flag.name == "learning_rate" and as_it_reads == 0
            assert read == as_it_reads or rate_is_found
        except SystemExit:
            assert "error: " in capsys.readouterr().err.splitlines()[-1]

    attempt()
