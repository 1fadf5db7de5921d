"""Rewards from a user's Python function, and from a reward model of another vocabulary."""

import asyncio
import os
import signal
import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from fastp3o.calls import event_loop
from fastp3o.calls import function as user_function
from fastp3o.calls.function import FunctionError
from fastp3o.errors import UserError
from fastp3o.models.loading import load_reward_model
from fastp3o.packing.pack import Packing
from fastp3o.rewards.config import RewardConfig
from fastp3o.rewards.function import FunctionReward
from fastp3o.rewards.model import ModelReward
from fastp3o.rollouts.groups import Group, token_ids

SETTINGS = {"device": torch.device("cpu"), "packing": Packing(64)}


def reward_of(function, timeout: float | None = None) -> FunctionReward:
    return FunctionReward("tests:f", timeout, function)


def returning(result: object) -> FunctionReward:
    return reward_of(lambda prompts, responses: result)


@pytest.mark.parametrize(
    "result",
    [
        (1, True, 0.5, 2),
        np.array([1, 1, 0.5, 2]),
        [np.float32(1), np.int64(1), torch.tensor(0.5), 2.0],
    ],
)
def test_numbers_of_every_kind_are_rewards_and_none_for_a_prompt_is_one_that_does_not_apply(
    rollouts, result
):
    assert returning(result)(rollouts).tolist() == [[1.0, 1.0], [0.5, 2.0]]
    assert returning([None, None, *result[2:]])(rollouts).tolist() == [[0.0, 0.0], [0.5, 2.0]]


@pytest.mark.parametrize(
    ("result", "said"),
    [
        ("1111", "tests:f must return a list of 4 entries, got a str"),
        (
            SimpleNamespace(tolist=lambda: 1 / 0),
            "got a SimpleNamespace that gives no list: ZeroDivisionError",
        ),
        (SimpleNamespace(tolist=sys.exit), "got a SimpleNamespace that gives no list: SystemExit"),
        ([1.0, 1.0, "1.5", 1.0], "tests:f must return a number for each response: "),
        ([1.0, None, 1.0, 1.0], "must return a number for each response: must be real number"),
        ([1.0, 10**400, 1.0, 1.0], "must return a number for each response: int too large"),
        (np.ones((4, 2)), "must return as many numbers for a response as it has completion_ids"),
        (torch.ones(2, 2), "must return 4 entries, one a response, got 2"),
    ],
)
def test_what_is_no_list_of_numbers_is_refused(rollouts, result, said):
    with pytest.raises(FunctionError, match=said):
        returning(result)(rollouts)


# Functions by what they are given, each with the columns that it asks for, and with its rewards.
ONCE, TWICE, NAMES = [[3, 3], [4, 4]], [[6, 6], [8, 8]], ["name", "function", "timeout"]
TAKING = {
    "by keyword": (
        lambda texts, said, *, answer, scale=2.0: [scale * a for a in answer],
        ["answer"],
        TWICE,
    ),
    "taking all": (lambda prompts, completions, **columns: columns["answer"], [], ONCE),
    "any number": (lambda *arguments: [len(arguments)] * 4, [], [[2, 2], [2, 2]]),
    "any name": (lambda prompts, responses, name, function, timeout: name, NAMES, ONCE),
    "by chance": (lambda prompts, responses, answer=(0, 0, 0, 0), note=None: answer, [], ONCE),
    "TRL": (
        lambda completions, answer, **rest: [a * len(set(rest["prompts"])) for a in answer],
        ["answer"],
        TWICE,
    ),
}


@pytest.mark.parametrize("kind", TAKING)
def test_columns_go_to_those_that_ask_beside_their_prompt(rollouts, kind):
    function, asks, rewards = TAKING[kind]
    reward = reward_of(function)
    assert reward.columns == asks
    columns = [
        dict.fromkeys(("answer", "name", "function", "timeout", "id"), answer) for answer in (3, 4)
    ]
    groups = [
        Group(g.prompt._replace(columns=own), g.responses)
        for g, own in zip(rollouts, columns, strict=True)
    ]
    assert reward(groups).tolist() == rewards
    if asks:
        with pytest.raises(
            ValueError,
            match=rf"tests:f asks for the columns {', '.join(asks)}, which the rollouts do",
        ):
            reward(rollouts)


@pytest.mark.parametrize(
    "function", [lambda prompts, own, responses: [], lambda prompts, *, responses: [], lambda: []]
)
def test_a_function_of_other_arguments_is_refused(function):
    with pytest.raises(
        ValueError, match="tests:f must take prompts and responses first, in this order"
    ):
        reward_of(function)


def test_a_function_may_change_what_it_gets(rollouts):
    def score(prompts, responses, tests):
        scores = [len(one) + len(one.append(0) or "") for one in tests]
        for given in (prompts, responses, tests):
            given.clear()
        return scores

    groups = [Group(g.prompt._replace(columns={"tests": [1, 2]}), g.responses) for g in rollouts]
    reward = reward_of(score)
    for _ in range(2):
        assert reward(groups).tolist() == [[2, 2], [2, 2]]
    shortened = reward_of(lambda prompts, responses: [responses.pop(), [1.0] * len(responses)][1])
    with pytest.raises(FunctionError, match="must return 4 entries, one a response, got 3"):
        shortened(rollouts)


def test_a_working_directory_that_a_function_changes_is_put_back(rollouts, tmp_path):
    def score(prompts, responses):
        os.chdir(tmp_path)
        return [1.0] * 4

    before = os.getcwd()
    assert reward_of(score)(rollouts).tolist() == [[1, 1], [1, 1]]
    assert os.getcwd() == before


def test_an_async_function_is_awaited_in_one_event_loop(rollouts):
    loops = set()

    async def one(response):
        await asyncio.sleep(0.1)
        return float(len(response))

    async def score(prompts, responses):
        loops.add(asyncio.get_running_loop())
        return await asyncio.gather(*map(one, responses))

    reward = reward_of(score)
    start = time.monotonic()
    for _ in range(2):
        assert reward(rollouts).tolist() == [[4, 4], [2, 2]]
    assert time.monotonic() - start < 0.6

    async def notebook():
        return reward(rollouts).tolist()

    assert asyncio.run(notebook()) == [[4, 4], [2, 2]]
    assert len(loops) == 1


class Panic(BaseException):
    """As Rust's libraries raise. Its text cannot be made."""

    def __str__(self):
        raise KeyError


@pytest.mark.parametrize(
    ("error", "awaited", "said"),
    [
        (SystemExit(0), False, r"ended the program \(sys.exit, status 0\)"),
        (Panic(), True, r"failed in .*, line \d+: Panic: its own text cannot be made"),
        (Panic(), False, r"failed in .*, line \d+: Panic: its own text cannot be made"),
        (asyncio.CancelledError(), True, r"failed in .*, line \d+: CancelledError"),
        (ValueError("\x1b[31mred"), False, r"failed in .*, line \d+: ValueError: \\x1b\[31mred"),
    ],
)
def test_whatever_a_function_raises_is_told_with_its_place(
    rollouts, monkeypatch, error, awaited, said
):
    def score(prompts, responses):
        raise error

    async def later(prompts, responses):
        raise error

    monkeypatch.setattr(sys, "tracebacklimit", 0, raising=False)
    with pytest.raises(FunctionError, match=f"tests:f {said}"):
        reward_of(later if awaited else score)(rollouts)


@pytest.fixture
def free_alarm():
    """pytest-timeout has the alarm otherwise, and a function beside another's alarm has no limit."""
    timer = signal.setitimer(signal.ITIMER_REAL, 0)
    handler = signal.signal(signal.SIGALRM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, *timer)


def sleeping(prompts, responses):
    time.sleep(30)


def swallowing(prompts, responses):
    """As a function that scores 0 whatever goes wrong."""
    try:
        time.sleep(30)
    except BaseException:
        return [0.0] * len(responses)


async def stubborn(prompts, responses):
    try:
        await asyncio.sleep(30)
    except asyncio.CancelledError:
        await asyncio.sleep(30)


async def blocking(prompts, responses):
    time.sleep(30)


@pytest.mark.parametrize("function", [sleeping, swallowing, stubborn, blocking])
def test_a_call_has_a_time_limit(rollouts, free_alarm, monkeypatch, function):
    for module in (event_loop, user_function):
        monkeypatch.setattr(module, "GRACE", 0.1 if function is blocking else 5.0)
    place = ": it was in .*test_reward.py" if function is sleeping else ""
    with pytest.raises(
        FunctionError, match=rf"tests:f has not returned after 0\.1 s \(--reward_timeout\){place}"
    ):
        reward_of(function, timeout=0.1)(rollouts)
    assert signal.getsignal(signal.SIGALRM) is signal.SIG_DFL
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_a_function_that_blocks_leaves_the_next_one_another_loop(rollouts, monkeypatch):
    async def good(prompts, responses):
        return [1.0] * len(responses)

    monkeypatch.setattr(event_loop, "GRACE", 0.1)
    with pytest.raises(FunctionError, match="has not returned after"):
        reward_of(blocking, timeout=0.1)(rollouts)
    assert reward_of(good, timeout=5.0)(rollouts).tolist() == [[1, 1], [1, 1]]


def test_a_long_call_is_told_and_one_that_nothing_interrupts_is_told_late(
    rollouts, free_alarm, monkeypatch, capsys
):
    def slow(prompts, responses):
        signal.signal(signal.SIGALRM, signal.SIG_IGN)
        time.sleep(0.5)
        return [1.0] * len(responses)

    monkeypatch.setattr(user_function, "LONG", 0.05)
    monkeypatch.setattr(user_function, "GRACE", 0.0)
    assert reward_of(slow, timeout=0.2)(rollouts).tolist() == [[1, 1], [1, 1]]
    said = [
        f"tests:f has not returned after {late} (--reward_timeout)"
        for late in ("0.05 s; it has 0.2", "0.2 s")
    ]
    assert capsys.readouterr().err.splitlines() == said


def test_texts_are_translated_for_another_vocabulary(tiny_model, tokenizer, rollouts):
    model = load_reward_model(tiny_model, new_head=True)
    torch.nn.init.normal_(model.model.score.weight)
    same = ModelReward(model, tokenizer, tokenizer, **SETTINGS)
    other = ModelReward(model, tokenizer, tokenizer, **SETTINGS)
    other.shares_vocabulary = False
    assert other.translate(rollouts) == token_ids(rollouts)
    assert same(rollouts).shape == (2, 2)
    assert torch.equal(same(rollouts), other(rollouts))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("mine_of_tests", "of mine_of_tests.py it is mine_of_tests:FUNCTION"),
        ("mine_of_tests.py", "of mine_of_tests.py it is mine_of_tests.py:FUNCTION"),
        ("mine_of_tests.vowels", "is no folder; a function is mine_of_tests:vowels$"),
        ("kit_of_tests.vowels", "is no folder; a function is kit_of_tests:vowels$"),
        ("kit_of_tests.inner.vowels", "a function is kit_of_tests.inner:vowels$"),
        ("kit_of_tests.inner", "a function is kit_of_tests.inner:FUNCTION$"),
        ("nosuch/model.v1,mine_of_tests.vowels", "the reward mine_of_tests.vowels is no folder"),
    ],
)
def test_a_function_without_a_colon_is_no_model_of_the_hub(tmp_path, monkeypatch, name, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "kit_of_tests").mkdir()
    raises = "raise RuntimeError('imported')\n"  # nobody asks for code to run yet
    for file in ("mine_of_tests.py", "kit_of_tests/__init__.py", "kit_of_tests/inner.py"):
        (tmp_path / file).write_text(raises)
    config = RewardConfig(reward=name)
    with pytest.raises(UserError, match=said):
        config.check_complete()


def test_folders_and_names_with_dots_are_models(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in ("mine_of_tests.v1", "only_data"):
        (tmp_path / folder).mkdir()
    (tmp_path / "mine_of_tests.py").touch()
    for name in ("mine_of_tests.v1", "only_data.v1", "org/mine_of_tests.v1", "nosuch_module.v1"):
        RewardConfig(reward=name).check_complete()
