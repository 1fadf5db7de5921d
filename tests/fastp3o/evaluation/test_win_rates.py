"""Win rates: the arithmetic on examples made by hand, their intervals, and the script on tiny
models.
"""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from fastp3o.commands import win_rate as win_rate_command
from fastp3o.errors import UserError
from fastp3o.evaluation import win_rates
from fastp3o.evaluation.length_controlled import length_controlled
from fastp3o.evaluation.verdicts import WinRate, win_rate
from fastp3o.evaluation.win_rates import Responses, WinRateConfig, by_comparison, by_reward
from fastp3o.rewards.comparing_function import load_function
from fastp3o.rewards.verdicts import Verdict
from fastp3o.rollouts.groups import Group, Prompt, Response
from tests.fastp3o.evaluation.test_judge import JUDGES

FIRST, SECOND, TIE, NONE = Verdict.FIRST, Verdict.SECOND, Verdict.TIE, Verdict.NONE


def test_ties_count_half_and_missing_verdicts_nowhere():
    rate = win_rate([FIRST, FIRST, TIE, SECOND, NONE, FIRST, NONE])
    assert (rate.wins, rate.ties, rate.losses, rate.missing, rate.prompts) == (3, 1, 1, 2, 5)
    assert rate.win_rate == 3.5 / 5
    assert rate.low < rate.win_rate < rate.high


def test_responses_to_one_prompt_stay_together_and_what_cannot_be_counted_is_an_error():
    verdicts = [FIRST] * 20 + [SECOND] * 20
    alone, together = (
        win_rate(verdicts),
        win_rate([v for v in verdicts for _ in range(9)], responses_per_prompt=9),
    )
    assert (alone.low, alone.high) == pytest.approx((together.low, together.high))
    half = 2.02269 * (0.25 / 39) ** 0.5  # Student's, of 39 degrees of freedom
    assert (alone.low, alone.high) == pytest.approx((0.5 - half, 0.5 + half), abs=1e-5)
    # Prompts with fewer verdicts weigh less: 3 of 4 comparisons are won, with residuals of 1/2,
    # −3/4 and 1/4 points.
    uneven = win_rate([FIRST, FIRST, SECOND, NONE, FIRST, NONE] * 9, responses_per_prompt=2)
    half = 2.05553 * (9 * (0.5**2 + 0.75**2 + 0.25**2) / 26 / 27) ** 0.5 / (4 / 3)
    assert (uneven.low, uneven.high) == pytest.approx((0.75 - half, 0.75 + half), abs=1e-5)
    for verdicts, said in (
        ([NONE] * 4, "none of 4 comparisons has a verdict"),
        ([TIE] * 3, "3 verdicts are not 2"),
    ):
        with pytest.raises(ValueError, match=said):
            win_rate(verdicts, responses_per_prompt=2)


def test_rounding_does_not_part_equal_responses_and_rewards_must_be_finite():
    def responses(finished: list[bool], rewards: list[float]) -> Responses:
        responses = [Response([2], text, ends) for text, ends in zip("abc", finished, strict=True)]
        return Responses([Group(Prompt("p", [1]), responses)], {"reward": torch.tensor([rewards])})

    first = responses([True, True, True], [1.0, 1.0, 1.0])
    second = responses([True, False, True], [1.0, 0.5, 1.0000001])
    assert by_reward(first, second) == [TIE, FIRST, TIE]
    with pytest.raises(
        ValueError,
        match=r"2 of 3 rewards of the second .* not finite, the first that of response 1",
    ):
        by_reward(first, responses([True] * 3, [0.0, float("nan"), float("inf")]))


def test_a_reward_that_compares_gives_verdicts_of_its_probabilities():
    def better(prompts, firsts, seconds):
        return [{"a": 0.6, "b": 0.5, "c": None, "d": 0.1}[first] for first in firsts]

    groups = [
        [Group(Prompt("p", [1]), [Response([2], text, True) for text in texts])]
        for texts in ("abcde", "xxxxe")
    ]
    first, second = (Responses(its, {}, load_function("f", None, better)) for its in groups)
    assert by_comparison(first, second) == [FIRST, TIE, NONE, SECOND, TIE]


def test_win_rates_at_equal_length_are_of_the_same_verdicts_and_say_where_they_are_missing(capsys):
    def responses(*texts: str) -> Responses:
        return Responses(
            [Group(Prompt("p", [1]), [Response([2], text, True)]) for text in texts], {}
        )

    def later(prompts, firsts, seconds):
        return [
            Verdict.FIRST if a > b else Verdict.SECOND if a < b else Verdict.TIE
            for a, b in zip(firsts, seconds, strict=True)
        ]

    settings = WinRateConfig(models="a,b", prompts="p", judge="a:b", max_response_tokens=8)
    first, second = responses("b", "aaa", "ccc", "a", "bb"), responses("a", "b", "a", "ccc", "b")
    ((_, rate),) = win_rates.win_rates(settings, later, first, second)
    points, longer = np.array([1.0, 0.0, 1.0, 0.0, 1.0]), np.array([0.0, 2.0, 2.0, -2.0, 1.0])
    assert rate.win_rate == 0.6
    assert rate.length_controlled == length_controlled(points, longer)
    ((_, same),) = win_rates.win_rates(settings, later, responses("a", "b"), responses("b", "a"))
    assert same.length_controlled is None
    assert (
        "no length-controlled win rate by judge: responses differ in length"
        in capsys.readouterr().out
    )


def save(tiny_model: str, folder: str, noise: float = 0.0, template: str | None = None) -> None:
    """The tiny model, its weights a little apart, with a chat template."""
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(tiny_model),
        AutoTokenizer.from_pretrained(tiny_model),
    )
    torch.manual_seed(1)
    for parameter in model.parameters():
        parameter.data += noise * torch.randn_like(parameter)
    tokenizer.chat_template = template
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def play(**changes) -> dict:
    """Runs the script and returns what it wrote."""
    given = {
        "prompts": "prompts.jsonl",
        "reward": "rewards_for_tests:vowels",
        "output": "new/o.json",
    }
    given |= {"max_response_tokens": 8, "max_prompt_tokens": 32, "seed": 3}
    win_rate_command.print_win_rates(WinRateConfig(**given | changes))
    return json.loads(Path("new/o.json").read_text())


def test_all_pairs_have_the_rates_that_each_has_alone(workplace, tiny_model, monkeypatch, capsys):
    """Of a checkpoint, another one, and the first again: each responds once."""
    Path("judges_by_length.py").write_text(JUDGES)
    save(tiny_model, "other", noise=0.2)
    save(tiny_model, "third")
    judged = {"judge": "judges_by_length:longer", "responses_per_prompt": 2}
    alone = play(models=[tiny_model, "other"], **judged)
    assert alone["config"]["models"] == f"{tiny_model},other"
    asked, respond = [], win_rates.respond
    monkeypatch.setattr(
        win_rates, "respond", lambda name, *given: asked.append(name) or respond(name, *given)
    )
    result = play(models=f"{tiny_model},other,third", **judged)
    assert asked == list(result["tokens_per_response"]) == [tiny_model, "other", "third"]
    rates = {(pair["first"], pair["second"]): pair["win_rates"] for pair in result["pairs"]}
    assert rates[tiny_model, "other"] == alone["pairs"][0]["win_rates"]
    even = {
        "win_rate": 0.5,
        "low": 0.5,
        "high": 0.5,
        "wins": 0,
        "ties": 16,
        "losses": 0,
        "missing": 0,
        "prompts": 8,
    }
    even["length_controlled"] = None  # equal responses are equally long
    assert rates[tiny_model, "third"] == {"reward": even, "judge": even}
    forth, back = (
        WinRate(**rates[pair]["reward"]) for pair in ((tiny_model, "other"), ("other", "third"))
    )
    assert forth.wins + forth.losses > 0
    assert (forth.wins, forth.losses, forth.ties) == (back.losses, back.wins, back.ties)
    assert forth.win_rate + back.win_rate == pytest.approx(1)
    assert f"{back.win_rate:.3f}" in capsys.readouterr().out


def test_different_texts_of_a_prompt_are_refused(workplace, tiny_model):
    Path("messages.jsonl").write_text(
        json.dumps({"messages": [{"role": "user", "content": "Say tree:"}]}) + "\n"
    )
    for name, end in (("plain", ""), ("same", ""), ("loud", "!")):
        save(tiny_model, name, template="{{ messages[0]['content'] }}" + end)
    (pair,) = play(models="plain,same", prompts="messages.jsonl")["pairs"]
    assert pair["win_rates"]["reward"]["ties"] == 1
    with pytest.raises(ValueError, match=r"plain and loud make different texts of messages\.jsonl"):
        play(models="plain,loud", prompts="messages.jsonl")


def test_checkpoints_that_are_no_pair_or_have_no_judge_are_refused():
    for given in ({"models": "a,b", "reward": None}, {"models": "a"}, {"models": "a,b,a"}):
        with pytest.raises(UserError):
            WinRateConfig(**{"prompts": "p", "reward": "r"} | given)
