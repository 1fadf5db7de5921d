import asyncio
import os
import re
import signal
import sys
import time

import numpy as np
import pytest
import torch

from fastp3o import named_function
from fastp3o.models.loading import load_reward_model
from fastp3o.named_function import FunctionError
from fastp3o.packing.pack import Packing
from fastp3o.rewards.function import FunctionReward
from fastp3o.rewards.model import ModelReward
from fastp3o.rewards.reward import load_reward
from fastp3o.rollouts.groups import Group, token_ids

SETTINGS = {"device": torch.device("cpu"), "packing": Packing(64)}


def load(name, tokenizer):
    return load_reward(name, tokenizer, dtype=torch.float32, **SETTINGS)


def test_a_function_sees_texts(workplace, tokenizer, rollouts):
    assert load("rewards_for_tests:vowels", tokenizer)(rollouts).tolist() == [[0.75, 0], [0.25, 0.25]]


def returning(result: object) -> FunctionReward:
    reward = FunctionReward("operator:eq")
    reward.function = lambda prompts, responses: result
    return reward


@pytest.mark.parametrize(
    "result",
    [
        [1, True, 0.5, 2],
        (1.0, 1, 0.5, 2),
        np.array([1, 1, 0.5, 2]),
        [np.float32(1), np.int64(1), torch.tensor(0.5), 2.0],
        torch.tensor([1, 1, 0.5, 2]),
    ],
)
def test_numbers_of_every_kind_are_rewards(rollouts, result):
    assert returning(result)(rollouts).tolist() == [[1.0, 1.0], [0.5, 2.0]]


@pytest.mark.parametrize(
    ("result", "said"),
    [
        ("1111", "operator:eq must return a list of 4 entries, got a str"),
        (None, "must return a list of 4 entries, got a NoneType"),
        (dict.fromkeys(range(4), 1.0), "must return a list of 4 entries, got a dict"),
        (1.0, "must return a list of 4 entries, got a float"),
        ([1.0, 1.0, "1.5", 1.0], "operator:eq must return a number for each response: "),
        ([1.0, None, 1.0, 1.0], "must return a number for each response: must be real number, not NoneType"),
        ([1.0, [1.0], 1.0, 1.0], "must return a number for each response: must be real number, not list"),
        ([1.0, 10**400, 1.0, 1.0], "must return a number for each response: int too large"),
        (np.ones((4, 2)), "must return a number for each response: shape"),
        (torch.ones(2, 2), "must return 4 entries, one a response, got 2"),
    ],
)
def test_what_is_no_list_of_numbers_is_refused(rollouts, result, said):
    with pytest.raises(ValueError, match=said):
        returning(result)(rollouts)


def test_none_for_all_responses_of_a_prompt_is_a_reward_that_does_not_apply(rollouts):
    assert returning([None, None, 0.5, 2])(rollouts).tolist() == [[0.0, 0.0], [0.5, 2.0]]


def test_a_function_that_ends_the_program_does_not_end_the_run_in_peace(rollouts):
    reward = returning(None)
    reward.function = lambda prompts, responses: sys.exit(0)
    with pytest.raises(ValueError, match=r"operator:eq ended the program \(sys.exit, status 0\)"):
        reward(rollouts)


TAKING = {
    "plain": lambda prompts, responses: [0.0] * len(responses),
    "asking": lambda prompts, responses, answer: [float(a) for a in answer],
    "by_keyword": lambda texts, outputs, *, answer, scale=2.0: [scale * a for a in answer],
    "taking_all": lambda prompts, completions, **columns: [float(a) for a in columns["answer"]],
    "any_number": lambda *arguments: [float(len(arguments))] * 4,
    "by_any_name": lambda prompts, responses, name, function, timeout: [float(a) for a in name],
    "as_in_trl": lambda completions, answer, **kwargs: [a * len(set(kwargs["prompts"])) for a in answer],
    "by_chance": lambda prompts, responses, answer=(0, 0, 0, 0), note=None: [float(a) for a in answer],
}


@pytest.mark.parametrize(
    ("name", "asks", "rewards"),
    [
        ("plain", [], [[0, 0], [0, 0]]),
        ("asking", ["answer"], [[3, 3], [4, 4]]),
        ("by_keyword", ["answer"], [[6, 6], [8, 8]]),
        ("taking_all", [], [[3, 3], [4, 4]]),
        ("any_number", [], [[2, 2], [2, 2]]),
        ("by_any_name", ["name", "function", "timeout"], [[3, 3], [4, 4]]),
        ("by_chance", [], [[3, 3], [4, 4]]),
        ("as_in_trl", ["answer"], [[6, 6], [8, 8]]),
    ],
)
def test_columns_go_to_those_that_ask_beside_their_prompt(rollouts, monkeypatch, name, asks, rewards):
    monkeypatch.setattr("operator.eq", TAKING[name])
    reward = FunctionReward("operator:eq")
    assert reward.columns == asks
    columns = [dict.fromkeys(("answer", "name", "function", "timeout", "id"), answer) for answer in (3, 4)]
    groups = [Group(g.prompt._replace(columns=own), g.responses) for g, own in zip(rollouts, columns, strict=True)]
    assert reward(groups).tolist() == rewards


def test_an_async_function_is_awaited_in_one_event_loop(rollouts, monkeypatch):
    loops = set()

    async def score(prompts, responses):
        loops.add(asyncio.get_running_loop())

        async def one(response):
            await asyncio.sleep(0.1)
            return float(len(response))

        return await asyncio.gather(*map(one, responses))

    monkeypatch.setattr("operator.eq", score)
    start = time.monotonic()
    for _ in range(2):
        assert FunctionReward("operator:eq")(rollouts).tolist() == [[4, 4], [2, 2]]
    assert time.monotonic() - start < 0.6

    async def notebook():
        return FunctionReward("operator:eq")(rollouts).tolist()

    assert asyncio.run(notebook()) == [[4, 4], [2, 2]]
    assert len(loops) == 1


@pytest.mark.parametrize("change", [list.clear, list.pop])
def test_a_function_may_change_the_lists_that_it_gets(rollouts, change):
    def score(prompts, responses):
        change(prompts)
        change(responses)
        return [1.0] * 4

    reward = returning(None)
    reward.function = score
    assert reward(rollouts).tolist() == [[1, 1], [1, 1]]
    reward.function = lambda prompts, responses: [change(responses), [1.0] * len(responses)][1]
    with pytest.raises(FunctionError, match=r"must return 4 entries, one a response, got [03]"):
        reward(rollouts)


def test_a_change_to_a_column_reaches_no_other_response(rollouts, monkeypatch):
    monkeypatch.setattr(
        "operator.eq", lambda prompts, responses, tests: [float(len(t) + len(t.append(0) or "")) for t in tests]
    )
    groups = [Group(g.prompt._replace(columns={"tests": [1, 2]}), g.responses) for g in rollouts]
    for _ in range(2):
        assert FunctionReward("operator:eq")(groups).tolist() == [[2, 2], [2, 2]]


def test_what_a_function_changes_in_the_process_is_put_back(rollouts, tmp_path):
    def score(prompts, responses):
        os.chdir(tmp_path)
        torch.set_grad_enabled(False)
        torch.set_default_device("meta")
        torch.set_default_dtype(torch.float64)
        return [1.0] * 4

    before = os.getcwd()
    reward = returning(None)
    reward.function = score
    assert reward(rollouts).tolist() == [[1, 1], [1, 1]]
    assert os.getcwd() == before
    assert torch.is_grad_enabled()
    assert torch.empty(0).device.type == "cpu"
    assert torch.empty(0).dtype == torch.float32


class NoList:
    def tolist(self):
        raise RuntimeError("no list")


@pytest.mark.parametrize(
    ("result", "said"),
    [
        (torch.ones(4, device="meta"), "must return a list of 4 entries, got a Tensor that gives no list"),
        (torch.ones(4).to_sparse(), "must return a list of 4 entries, got a Tensor that gives no list"),
        (NoList(), "got a NoList that gives no list: RuntimeError: no list"),
        ([torch.ones((), device="meta")] * 4, "must return a number for each response: .* meta tensors"),
    ],
)
def test_what_cannot_be_read_is_refused(rollouts, result, said):
    with pytest.raises(FunctionError, match=said):
        returning(result)(rollouts)


class Panic(BaseException):
    """As Rust's libraries raise."""


@pytest.mark.parametrize("error", [asyncio.CancelledError, Panic])
@pytest.mark.parametrize("awaited", [False, True])
def test_errors_that_are_no_exceptions_are_the_functions(rollouts, error, awaited):
    def score(prompts, responses):
        raise error("enough")

    async def later(prompts, responses):
        raise error("enough")

    reward = returning(None)
    reward.function = later if awaited else score
    with pytest.raises(FunctionError, match=rf"operator:eq failed in .*, line \d+: {error.__name__}"):
        reward(rollouts)


def test_an_async_function_that_blocks_has_a_time_limit(rollouts, free_alarm, monkeypatch):
    async def score(prompts, responses):
        time.sleep(30)

    monkeypatch.setattr(named_function, "GRACE", 0.1)
    reward = returning(None)
    reward.function, reward.timeout = score, 0.1
    with pytest.raises(
        FunctionError, match=r"not returned after 0\.1 s \(--reward_timeout\): it was in .*test_reward.py"
    ):
        reward(rollouts)


@pytest.mark.parametrize("stubborn", [False, True])
def test_an_async_function_has_a_time_limit(rollouts, stubborn):
    async def score(prompts, responses):
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            await asyncio.sleep(30 * stubborn)

    reward = returning(None)
    reward.function, reward.timeout = score, 0.1
    with pytest.raises(FunctionError, match=r"operator:eq has not returned after 0\.1 s \(--reward_timeout\)"):
        reward(rollouts)


@pytest.fixture
def free_alarm():
    """pytest-timeout has the alarm otherwise, and a function beside another's alarm has no limit."""
    timer = signal.setitimer(signal.ITIMER_REAL, 0)
    handler = signal.signal(signal.SIGALRM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, *timer)


def endless(prompts, responses):
    while True:
        pass


def sleeping(prompts, responses):
    time.sleep(30)


def backtracking(prompts, responses):
    re.match(r"(a+)+$", "a" * 40 + "b")


def swallowing(prompts, responses):
    """As a function that scores 0 whatever goes wrong."""
    try:
        time.sleep(30)
    except BaseException:
        return [0.0] * len(responses)


@pytest.mark.parametrize("function", [endless, sleeping, backtracking, swallowing])
def test_a_plain_function_has_a_time_limit(rollouts, free_alarm, function):
    reward = returning(None)
    reward.function, reward.timeout = function, 0.1
    before = signal.getsignal(signal.SIGALRM)
    with pytest.raises(FunctionError, match=r"operator:eq has not returned after 0\.1 s \(--reward_timeout\)"):
        reward(rollouts)
    assert signal.getsignal(signal.SIGALRM) is before
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


@pytest.mark.parametrize("is_async", [False, True])
def test_a_call_that_takes_long_is_said_to(rollouts, free_alarm, monkeypatch, capsys, is_async):
    async def patient(prompts, responses):
        await asyncio.sleep(0.3)
        return [1.0] * len(responses)

    def slow(prompts, responses):
        time.sleep(0.3)
        return [1.0] * len(responses)

    monkeypatch.setattr(named_function, "LONG", 0.05)
    reward = returning(None)
    reward.function, reward.timeout = patient if is_async else slow, 20.0
    assert reward(rollouts).tolist() == [[1, 1], [1, 1]]
    assert capsys.readouterr().err == "operator:eq has not returned after 0.05 s; it has 20 (--reward_timeout)\n"


def test_a_functions_own_alarms_ring_for_it(rollouts, free_alarm):
    """As in libraries that check answers: handler and alarm set for a moment, or a handler for good."""
    rung = []

    def score(prompts, responses):
        before = signal.signal(signal.SIGALRM, lambda *_: rung.append("short"))
        signal.setitimer(signal.ITIMER_REAL, 0.02)
        time.sleep(0.05)
        signal.signal(signal.SIGALRM, before)
        return [1.0] * 4

    def stays(prompts, responses):
        if signal.getsignal(signal.SIGALRM) is not own:
            signal.signal(signal.SIGALRM, own)
        signal.setitimer(signal.ITIMER_REAL, 0.02)
        time.sleep(0.3)
        return [1.0] * 4

    def own(*_):
        rung.append("stays")

    reward = returning(None)
    reward.timeout, reward.function = 0.2, score
    reward(rollouts)
    reward.function = stays
    reward(rollouts)
    reward(rollouts)
    assert rung == ["short", "stays", "stays"]


def test_what_cannot_be_interrupted_is_said_to_be_late(rollouts, free_alarm, monkeypatch, capsys):
    monkeypatch.setattr("fastp3o.named_function.GRACE", 0.0)

    def score(prompts, responses):
        signal.signal(signal.SIGALRM, signal.SIG_IGN)
        time.sleep(0.4)
        return [1.0] * 4

    reward = returning(None)
    reward.timeout, reward.function = 0.1, score
    reward(rollouts)
    assert "operator:eq has not returned after 0.1 s" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("leave", "status", "said"),
    [
        (lambda: None, 1, True),
        (lambda: 1 / 0, 1, True),
        (sys.exit, 0, False),
        (lambda: sys.exit(3), 3, True),
        (lambda: os._exit(0), 0, False),
    ],
)
def test_a_forked_process_does_not_go_on_with_the_run(rollouts, capfd, leave, status, said):
    children = []

    def score(prompts, responses):
        children.append(os.fork())
        if not children[-1]:
            leave()
        return [1.0] * 4

    reward = returning(None)
    reward.function = score
    assert reward(rollouts).tolist() == [[1, 1], [1, 1]]
    assert os.waitstatus_to_exitcode(os.waitpid(children[0], 0)[1]) == status
    assert ("operator:eq has forked a process that left the function" in capfd.readouterr().err) == said


def test_columns_that_the_rollouts_lack_are_named(rollouts, monkeypatch):
    monkeypatch.setattr("operator.eq", TAKING["asking"])
    with pytest.raises(ValueError, match="operator:eq asks for the columns answer, which the rollouts do not have"):
        FunctionReward("operator:eq")(rollouts)


@pytest.mark.parametrize(
    "function",
    [
        lambda responses: [],
        lambda completions, answer: [],
        lambda responses, prompts: [],
        lambda answer, prompts: [],
        lambda prompts, answer, responses: [],
        lambda prompts, *, responses: [],
        lambda: [],
    ],
)
def test_a_function_of_other_arguments_is_refused(monkeypatch, function):
    monkeypatch.setattr("operator.eq", function)
    with pytest.raises(ValueError, match="operator:eq must take prompts and responses first, in this order"):
        FunctionReward("operator:eq")


@pytest.mark.parametrize("name", ["no_such_module:f", "rewards_for_tests:no_such_function"])
def test_a_function_that_is_not_there_is_named(workplace, tokenizer, name):
    with pytest.raises(ValueError, match=name):
        load(name, tokenizer)


def test_texts_are_translated_for_another_vocabulary(tiny_model, tokenizer, rollouts):
    model = load_reward_model(tiny_model, new_head=True)
    torch.nn.init.normal_(model.model.score.weight)
    same = ModelReward(model, tokenizer, tokenizer, **SETTINGS)
    other = ModelReward(model, tokenizer, tokenizer, **SETTINGS)
    other.shares_vocabulary = False
    assert other.translate(rollouts) == token_ids(rollouts)
    assert same(rollouts).shape == (2, 2)
    assert torch.equal(same(rollouts), other(rollouts))
