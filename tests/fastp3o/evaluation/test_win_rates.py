"""Win rates: the arithmetic on examples made by hand, their intervals, and the script on tiny models."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from fastp3o.cli import parse
from fastp3o.commands import win_rate as win_rate_command
from fastp3o.errors import UserError
from fastp3o.evaluation import win_rates
from fastp3o.evaluation.verdicts import Verdict, percentile_interval, reward_verdicts, win_rate
from fastp3o.evaluation.win_rates import Responses, WinRateConfig, by_reward
from fastp3o.rollouts.groups import Group, Prompt, Response

FIRST, SECOND, TIE, NONE = Verdict.FIRST, Verdict.SECOND, Verdict.TIE, Verdict.NONE


# Arithmetic


def test_ties_count_half_and_missing_verdicts_nowhere():
    rate = win_rate([FIRST, FIRST, TIE, SECOND, NONE, FIRST, NONE])
    assert (rate.wins, rate.ties, rate.losses, rate.missing, rate.prompts) == (3, 1, 1, 2, 5)
    assert rate.win_rate == 3.5 / 5
    assert rate.low < rate.win_rate < rate.high


def test_responses_to_one_prompt_stay_together():
    verdicts = [FIRST] * 20 + [SECOND] * 20
    alone, together = win_rate(verdicts), win_rate([v for v in verdicts for _ in range(9)], responses_per_prompt=9)
    assert (alone.low, alone.high) == (together.low, together.high)


@pytest.mark.parametrize(
    ("verdicts", "samples", "message"),
    [
        ([], 1, "none of 0"),
        ([NONE] * 4, 2, "none of 4 comparisons has a verdict"),
        ([TIE] * 3, 2, "3 verdicts are not 2"),
    ],
)
def test_nothing_to_count_is_an_error(verdicts, samples, message):
    with pytest.raises(ValueError, match=message):
        win_rate(verdicts, responses_per_prompt=samples)


@settings(max_examples=6, deadline=None)
@given(st.lists(st.sampled_from(Verdict), min_size=1, max_size=8).filter(lambda verdicts: set(verdicts) != {NONE}))
def test_the_second_wins_what_the_first_does_not(verdicts):
    forth, back = win_rate(verdicts), win_rate([verdict.swapped for verdict in verdicts])
    assert forth.win_rate + back.win_rate == pytest.approx(1)
    assert (forth.low + back.high, forth.high + back.low) == pytest.approx((1, 1))
    assert (forth.wins, forth.ties, forth.missing) == (back.losses, back.ties, back.missing)


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_a_reward_that_is_not_finite_is_named(broken):
    with pytest.raises(ValueError, match=r"2 of 3 rewards of the second .* not finite, the first that of response 1"):
        reward_verdicts([0.0, 0.0, 0.0], [0.0, broken, broken])


def test_rounding_does_not_part_equal_responses():
    def responses(finished: list[bool], rewards: list[float]) -> Responses:
        responses = [Response([2], text, ends) for text, ends in zip("abc", finished, strict=True)]
        return Responses([Group(Prompt("p", [1]), responses)], {"reward": torch.tensor([rewards])})

    first, second = (
        responses([True, True, True], [1.0, 1.0, 1.0]),
        responses([True, False, True], [1.0, 0.5, 1.0000001]),
    )
    assert by_reward(first, second) == [TIE, FIRST, TIE]


# Intervals


def test_the_interval_covers_the_truth_about_as_often_as_it_says():
    random = np.random.default_rng(0)
    covered, experiments, prompts, samples = 0, 200, 40, 3
    for experiment in range(experiments):
        # Each prompt has its own chance to win, so that comparisons of one prompt go together; their mean is 0.5.
        chances = random.choice([0.2, 0.8], size=(prompts, 1))
        points = random.binomial(1, chances, size=(prompts, samples)).sum(axis=1)
        low, high = percentile_interval(points, np.full(prompts, samples), seed=experiment, resamples=400)
        covered += low <= 0.5 <= high
    assert 0.90 <= covered / experiments <= 0.99


# The script

JUDGES = """
def longer(prompts, firsts, seconds):
    return ["first" if len(a) > len(b) else "second" if len(b) > len(a) else "tie" for a, b in zip(firsts, seconds)]

def silent(prompts, firsts, seconds):
    return ["none"] * len(prompts)
"""


@pytest.fixture(scope="module")
def other_model(tiny_model, tmp_path_factory) -> str:
    """The tiny model with weights a little apart."""
    folder = tmp_path_factory.mktemp("other")
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(folder)
    return str(folder)


@pytest.fixture
def play(workplace, monkeypatch):
    """Runs the script and returns what it wrote."""
    (workplace / "judges_of_win_rates.py").write_text(JUDGES)

    def run(first: str, second: str, *flags: str) -> dict:
        shared = ["--prompts", "prompts.jsonl", "--max_response_tokens", "8", "--max_prompt_tokens", "32"]
        config = parse(WinRateConfig, ["--first", first, "--second", second, *shared, "--output", "new/o.json", *flags])
        win_rate_command.print_win_rates(config)
        return json.loads(Path("new/o.json").read_text())

    return run


def test_a_checkpoint_against_itself_is_all_ties(play, tiny_model, capsys):
    flags = [
        "--reward",
        "rewards_for_tests:vowels",
        "--judge",
        "judges_of_win_rates:longer",
        "--responses_per_prompt",
        "2",
    ]
    result = play(tiny_model, tiny_model, *flags)
    even = {"win_rate": 0.5, "low": 0.5, "high": 0.5, "wins": 0, "ties": 16, "losses": 0, "missing": 0, "prompts": 8}
    assert result["win_rates"] == {"reward": even, "judge": even}
    table = capsys.readouterr().out
    assert table.count("0.500 to 0.500") == 2
    assert "tokens per response: 8.0 of the first, 8.0 of the second" in table


def test_exchanged_checkpoints_exchange_wins(play, tiny_model, other_model):
    flags = ["--reward", "rewards_for_tests:vowels", "--responses_per_prompt", "4", "--seed", "3"]
    forth, back = play(tiny_model, other_model, *flags), play(other_model, tiny_model, *flags)
    one, other = forth["win_rates"]["reward"], back["win_rates"]["reward"]
    assert one["wins"] + one["losses"] > 0
    assert (one["wins"], one["losses"]) == (other["losses"], other["wins"])
    assert one["win_rate"] + other["win_rate"] == pytest.approx(1)
    assert forth["tokens_per_response"]["first"] == back["tokens_per_response"]["second"]
    assert forth["config"]["first"] == tiny_model


def test_all_pairs_have_the_rates_that_each_has_alone(play, tiny_model, other_model, monkeypatch, capsys):
    """Each checkpoint responds once."""
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained("third")
    AutoModelForCausalLM.from_pretrained(tiny_model).save_pretrained("third")
    flags = ["--reward", "rewards_for_tests:vowels", "--judge", "judges_of_win_rates:longer", "--seed", "3"]
    flags += ["--max_response_tokens", "8", "--prompts", "prompts.jsonl"]
    names = [tiny_model, other_model, "third"]
    alone = {
        (first, second): play(first, second, *flags)["win_rates"]
        for first, second in [(names[0], names[1]), (names[0], names[2]), (names[1], names[2])]
    }
    capsys.readouterr()
    asked, respond = [], win_rates.respond
    monkeypatch.setattr(win_rates, "respond", lambda name, *given: asked.append(name) or respond(name, *given))
    flags += ["--max_prompt_tokens", "32", "--output", "o.json"]
    config = parse(WinRateConfig, ["--models", ",".join(names), *flags])
    win_rate_command.print_win_rates(config)
    result = json.loads(Path("o.json").read_text())
    assert {(pair["first"], pair["second"]): pair["win_rates"] for pair in result["pairs"]} == alone
    assert asked == names
    assert list(result["tokens_per_response"]) == names
    printed = capsys.readouterr().out
    assert "win rates by reward" in printed
    assert "win rates by judge" in printed
    rate = alone[names[0], names[1]]["reward"]
    for value in (rate["win_rate"], 1 - rate["win_rate"]):
        assert f"{value:.3f}" in printed
    assert f"{1 - rate['high']:.3f} to {1 - rate['low']:.3f}" in printed


def test_an_output_that_is_a_folder_is_refused_before_anything_is_sampled(workplace):
    Path("folder").mkdir()
    config = parse(
        WinRateConfig, ["--first", "a", "--second", "b", "--prompts", "p", "--reward", "r", "--output", "folder"]
    )
    with pytest.raises(UserError, match="--output folder is a folder"):
        win_rate_command.print_win_rates(config)


def test_a_judge_that_says_nothing_is_an_error(play, tiny_model):
    with pytest.raises(ValueError, match="none of 8 comparisons has a verdict"):
        play(tiny_model, tiny_model, "--judge", "judges_of_win_rates:silent")


def test_different_texts_of_a_prompt_are_refused(play, tiny_model):
    message = {"role": "user", "content": "Say tree:"}
    Path("messages.jsonl").write_text(json.dumps({"messages": [message]}) + "\n")
    for name in ("plain", "loud"):
        tokenizer = AutoTokenizer.from_pretrained(tiny_model)
        tokenizer.chat_template = "{{ messages[0]['content'] }}" + ("!" if name == "loud" else "")
        tokenizer.save_pretrained(name)
        AutoModelForCausalLM.from_pretrained(tiny_model).save_pretrained(name)
    flags = ["--reward", "rewards_for_tests:vowels", "--prompts", "messages.jsonl"]
    assert play("plain", "plain", *flags)["win_rates"]["reward"]["ties"] == 1
    with pytest.raises(ValueError, match=r"plain and loud make different texts of messages\.jsonl"):
        play("plain", "loud", *flags)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "nothing says who wins"),
        (["--judge", "m:f", "--judge_url", "http://a", "--judge_model", "m"], "exclude each other"),
        (["--judge_url", "http://a"], "go together"),
        (["--judge_model", "m", "--reward", "r"], "go together"),
        (["--reward", "r", "--verdicts", "v.jsonl"], "--verdicts does nothing without --judge_url"),
        (["--reward", "r", "--responses_per_prompt", "0"], "--responses_per_prompt must be at least 1, got 0"),
        (["--reward", "r", "--models", "a,b"], "--models takes the place of --first and --second"),
    ],
)
def test_flags_that_contradict_each_other_are_refused(capsys, flags, message):
    with pytest.raises(SystemExit):
        parse(WinRateConfig, ["--first", "a", "--second", "b", "--prompts", "p", *flags])
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "give --first and --second, or --models"),
        (["--first", "a"], "give --first and --second, or --models"),
        (["--models", "a"], "--models must be two or more different checkpoints"),
        (["--models", "a,,b"], "--models must be two or more different checkpoints"),
        (["--models", "a,b,a"], "--models must be two or more different checkpoints"),
    ],
)
def test_checkpoints_that_are_no_pair_are_refused(capsys, flags, message):
    with pytest.raises(SystemExit):
        parse(WinRateConfig, ["--reward", "r", "--prompts", "p", *flags])
    assert message in capsys.readouterr().err
