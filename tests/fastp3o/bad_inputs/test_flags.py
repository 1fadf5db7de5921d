"""Every rule of every flag, as its field states it: at a bound it is taken, beyond it is refused by name. Odd values of
every flag are refused in one line or taken as they read.
"""

import shlex
from collections import defaultdict
from dataclasses import Field, fields, replace
from typing import Any, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastp3o.config import Flags, bounds, broken_rule, conditions, field_type
from fastp3o.errors import UserError
from tests.fastp3o.bad_inputs.working import CONFIGS, WORKING, configure, fuzz

BOUNDS = {
    "above": (1e-9, 0),
    "at_least": (0, -1),
    "below": (-1e-9, 0),
    "at_most": (0, 1),
}  # steps that are taken, refused
BOUNDED = {
    "0 or more": "centring cg_damping delta dynamic_sampling early_stopping entropy_coef eval_every gamma hang_minutes "
    "keep_checkpoints kl_coef length_penalty length_penalty_after log_rollouts log_rollouts_prompts lora_rank min_gap "
    "missing_eos_penalty ngram_penalty nll_weight odds_weight overlong_margin prompts_per_minibatch "
    "reference_every reward_clip reward_retries rounds_ahead sampler_ratio_cap samples_every "
    "save_every save_minutes seed sft_coef shard_size tau top_k trainable_layers value_coef warmup_steps "
    "weight_decay",
    "above 0": "adam_eps beta clip_high clip_range critic_learning_rate desirable_weight "
    "environment_timeout eta kl_coef learning_rate lora_alpha max_grad_norm max_kl ptx_coef reward_timeout "
    "rollout_memory step_kl_coef step_kl_target target_kl tau temperature undesirable_weight "
    "value_clip_range vllm_time_limit",
    "above 0 and at most 1": "mixture top_p",
    "above 0 and below 1": "clip_low",
    "at least 0 and below 0.5": "label_smoothing",
    "at least 0 and below 1": "adam_beta1 adam_beta2 lora_dropout reference_decay",
    "at least 0 and below 2**32": "seed",
    "at least 1": "accept batch_size cg_steps epochs eval_batch_size eval_limit eval_responses_per_prompt gpus heads "
    "hidden_size inner_epochs intermediate_size judge_requests largest layers limit line_search_steps max_characters "
    "max_prompt_tokens max_response_tokens max_tokens max_turn_tokens max_turns ngram_length prompt_tokens "
    "prompts_per_update ptx_batch_size ratio_cap response_tokens responses_per_prompt revisions reward_batch_size "
    "reward_requests rollout_batch_size tokens_per_row updates vllm_requests",
    "at least 2": "responses_per_prompt",
    "at least 258": "vocab_size",
    "within 0 and 1": "gae_lambda min_p mixture",
}


def every_configuration() -> dict[str, Flags]:
    """One that works for each script, and for each objective of those that have several."""
    found = {}
    for script, kind in CONFIGS.items():
        for objective in kind if isinstance(kind, dict) else [""]:
            chosen = f" --objective {objective}" if objective else ""
            found[f"{script} {objective}"] = configure(script, shlex.split(WORKING[script] + chosen))
    return found


EVERY = every_configuration()


def refusal(config: Flags, name: str, value: Any) -> str:
    """The error for one other value; "" if it is taken."""
    try:
        replace(config, **{name: value}).check_complete()
    except UserError as error:
        return str(error)
    return ""


def numbers(config: Flags) -> list[tuple[Field, type]]:
    hints = get_type_hints(type(config))
    return [(flag, kind) for flag in fields(config) if (kind := field_type(hints[flag.name])) in (int, float)]


@pytest.mark.parametrize("name", EVERY)
def test_a_number_beyond_its_bounds_is_refused_and_one_at_them_taken(name: str):
    config = EVERY[name]
    for flag, kind in numbers(config):
        for rule, (taken, refused) in BOUNDS.items():
            if rule in flag.metadata:
                bound = flag.metadata[rule]
                step = 1 if kind is int and rule in ("above", "below") else taken
                inside = refusal(config, flag.name, kind(bound + (-1 if rule == "below" and kind is int else step)))
                assert not inside.startswith(f"--{flag.name} must be {bounds(flag.metadata)}, got"), inside
                wrong = refusal(config, flag.name, kind(bound + refused))
                assert wrong.startswith(f"--{flag.name} must be {bounds(flag.metadata)}, got"), wrong
        for value in (float("nan"), float("inf"), 10**30) if kind is float else (10**30,):
            assert refusal(config, flag.name, value).startswith(f"--{flag.name} must be")


def test_the_bounds_are_these():
    found = defaultdict(set)
    for config in EVERY.values():
        for flag, _ in numbers(config):
            found[bounds(flag.metadata)].add(flag.name)
    assert {words: " ".join(sorted(names)) for words, names in sorted(found.items()) if words} == BOUNDED


@pytest.mark.parametrize("name", EVERY)
def test_other_choices_and_flags_without_what_they_need_are_refused_and_what_is_required_must_come(name: str):
    config = EVERY[name]
    hints, flags = get_type_hints(type(config)), {flag.name: flag for flag in fields(config)}
    for flag in flags.values():
        if "choices" in flag.metadata:
            assert refusal(config, flag.name, "nosuch").startswith(f"--{flag.name} must be one of ")
        if flag.metadata.get("required"):
            assert refusal(config, flag.name, "").startswith(f"--{flag.name} is missing")
    needs = [(flag, flags[flag].metadata.get("needs", ())) for flag in flags] + [*config.further_needs.items()]
    for flag, needed in needs:
        present = [need for need in conditions(needed) if need.flag in flags]
        if present and getattr(config, flag) == flags[flag].default and not any(need.holds(config) for need in present):
            said = refusal(config, flag, another(flags[flag], field_type(hints[flag])))
            assert said.startswith(f"--{flag} does nothing without "), said


def another(flag: Field, kind: type) -> Any:
    """A value that is not the default, within the flag's own rules."""
    numbers = [kind(value) for value in (0.01, 0.5, 1, 2, 3)] if kind in (int, float) else []
    candidates = flag.metadata.get("choices", [True, False] if kind is bool else [*numbers, "1"])
    return next(value for value in candidates if value != flag.default and not broken_rule(value, flag.metadata))


ODD = (
    *("", " ", "nan", "-inf", "1e400", "1e-400", "-1", "-0.0", "1", "1.5", "1e30", "9" * 30, "0x10", "1_000", "٣"),
    *("true", "None", "a\0b", "é漢", "\udcff", "[]", "{}", ",", "a,b", ":", "x" * 5000, ".", "models", "p.jsonl"),
)


@pytest.mark.parametrize("script", WORKING)
def test_an_odd_value_is_refused_in_one_line_or_taken_as_it_reads(script: str, capsys: pytest.CaptureFixture[str]):
    working = shlex.split(WORKING[script])

    @fuzz
    @given(st.sampled_from(fields(configure(script, working))), st.sampled_from(ODD))
    def attempt(flag: Field, value: str) -> None:
        try:
            read = getattr(configure(script, [*working, f"--{flag.name}={value}"]), flag.name)
            assert read == (value in ("true", "1") if isinstance(read, bool) else type(read)(value))
        except SystemExit:
            assert "error: " in capsys.readouterr().err.splitlines()[-1]

    attempt()
