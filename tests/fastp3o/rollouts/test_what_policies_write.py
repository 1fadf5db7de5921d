"""Whatever a policy writes is answered: calls of tools, code that they run, long texts; what
environments return.
"""

import asyncio
import copy
import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastp3o import UserError, train
from fastp3o.calls.function import FunctionError
from fastp3o.rewards.verifiable import UNIT, exact_match, final_answer, word_overlap
from fastp3o.rollouts.groups import Prompt
from fastp3o.rollouts.turns.calls import calls_in, hermes_calls
from fastp3o.rollouts.turns.environment import Environments
from fastp3o.rollouts.turns.observation import (
    SHORT,
    chat_observations,
    longest_text,
    plain_observations,
)
from fastp3o.rollouts.turns.sampler import TrajectorySampler
from fastp3o.rollouts.turns.tools import make_tool, tool_environment
from tests.fastp3o.rollouts.environments import OneTurn, games
from tests.fastp3o.runs import metrics


class OddError(Exception):
    def __str__(self):
        raise ValueError("no text")


class Panic(BaseException):
    """As Rust's libraries raise."""


class Silent:
    def __str__(self):
        raise SystemExit(3)


RAISED = [
    SystemExit(0),
    SystemExit("quota"),
    KeyboardInterrupt(),
    GeneratorExit(),
    asyncio.CancelledError(),
    Panic(),
]
RAISED += [OddError(), RecursionError(), MemoryError(), StopIteration(), StopAsyncIteration()]
CYCLE: list = []
CYCLE.append(CYCLE)
RETURNED = [
    10**5000,
    Silent(),
    None,
    b"\xff",
    CYCLE,
    float("nan"),
    b"\xff".decode(errors="surrogateescape"),
    "x" * 10**4,
]
UNWRITTEN = 2  # the first of them have no text


def echo(text: str) -> str:
    """Says it.

    Args:
        text: what
    """
    return text


def outcome(number: int) -> object:
    """Raises or returns something odd.

    Args:
        number: of it
    """
    if number < len(RAISED):
        raise RAISED[number]
    return RETURNED[number - len(RAISED)]


async def later(number: int) -> object:
    """The same, a little later, in a task of its own.

    Args:
        number: of it
    """
    await asyncio.sleep(0)
    return (await asyncio.gather(asyncio.to_thread(outcome, number), asyncio.sleep(0)))[0]


async def together(number: int) -> object:
    """The same, in a group of tasks.

    Args:
        number: of it
    """

    async def one() -> object:
        return outcome(number)

    async with asyncio.TaskGroup() as group:
        task = group.create_task(one())
    return task.result()


def python(code: str) -> str:
    """Runs code.

    Args:
        code: what runs
    """
    exec(code)
    return "ran"


TOOLS = tool_environment([make_tool(one) for one in (echo, outcome, later, together, python)])


def answered(text: str):
    """The Step that answers a turn, which costs neither a run nor a trajectory."""
    environments = Environments("tools", TOOLS)
    made, _ = environments.begin([{}])
    (step,) = environments.step(made, [hermes_calls(text)])
    return step


def call(name: object, arguments: object) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


NAMES = [
    "echo",
    "outcome",
    "later",
    "nosuch",
    "__class__",
    "",
    ["echo"],
    {"echo": 1},
    None,
    1,
    True,
    "\ud83d",
]
ODD = [
    "9" * 5000,
    "1e999",
    "NaN",
    "-Infinity",
    "[" * 3000,
    '{"name":' * 3000,
    '"\\x"',
    "'a'",
    "",
    "null",
    '"\\ude00\\ud83d"',
]
LETTERS = st.text(st.sampled_from('{}[]":,\\ud83dnameargtx1 \n<>/_cl\ud83d\x00\u2028'), max_size=60)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | LETTERS,
    st.lists,
    max_leaves=4,
)
WELL_FORMED = st.builds(
    lambda name, fields: json.dumps({"name": name, "arguments": fields}),
    st.sampled_from(NAMES),
    VALUES
    | st.dictionaries(
        st.sampled_from(["text", "number", "self", "*", "\ud83d"]), VALUES, max_size=2
    ),
)
ODDLY = st.builds(
    '{{"name": {}, "arguments": {{{}: {}, {}: {}}}}}'.format,
    *(st.sampled_from([*map(json.dumps, NAMES), *ODD]) for _ in range(5)),
)
MARKS = st.sampled_from(["<tool_call>", "</tool_call>", "", " ", "<tool_call"])
TURNS = st.lists(
    st.builds("{}{}{}".format, MARKS, WELL_FORMED | ODDLY | LETTERS | st.sampled_from(ODD), MARKS),
    max_size=3,
)


@pytest.fixture(scope="module")
def observes(tokenizer):
    chat = copy.deepcopy(tokenizer)
    chat.chat_template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}\n{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    return [plain_observations(tokenizer), chat_observations(chat, "tool", {chat.eos_token_id})]


@settings(max_examples=400, deadline=None, database=None)
@given(TURNS)
def test_every_turn_is_answered_in_text_that_has_tokens(observes, turns):
    step = answered("".join(turns))
    assert not step.failure
    for observe in observes:
        observe(step.observation, 5)


@pytest.mark.parametrize("tool", ["outcome", "later", "together"])
@pytest.mark.parametrize("number", range(len(RAISED) + len(RETURNED)))
def test_whatever_a_tool_raises_or_returns_is_its_answer_and_the_next_is_asked(
    observes, tool, number
):
    step = answered(call(tool, {"number": number}) + call("echo", {"text": "next"}))
    assert step.observation.endswith("\nnext")
    assert step.observation.startswith("error: ") == (number < len(RAISED) + UNWRITTEN)
    for observe in observes:
        observe(step.observation, 5)


LOOP = "import asyncio, sys; loop = asyncio.get_running_loop(); "
ENDINGS = [
    "exit()",
    "import os; os._exit(0)",
    "import os; os._exit(3)",
    LOOP + "loop.stop()",
    LOOP + "loop.close()",
]
ENDINGS += [
    LOOP + "[task.cancel() for task in asyncio.all_tasks()]",
    "raise BaseException",
    "1 / 0",
]


@pytest.mark.parametrize("code", ENDINGS)
def test_code_that_ends_the_program_or_the_event_loop_ends_no_run(code):
    began = time.monotonic()
    environments = Environments("tools", TOOLS, survives=True)
    made, _ = environments.begin([{}, {}])
    turns = [call("python", {"code": code}), call("echo", {"text": "fine"})]
    first, other = environments.step(made, [hermes_calls(turn) for turn in turns])
    assert first.observation in ("ran", "") or first.observation.startswith("error: ")
    if "cancel" not in code:
        assert other.observation == "fine"
    assert answered(call("echo", {"text": "next"})).observation == "next"
    assert time.monotonic() - began < 10


LONG = 10**6
BLANKS = [
    " " * LONG,
    "<tool_call>" + " " * LONG,
    "<tool_call>" * (LONG // 11),
    "<tool_call" * (LONG // 10),
]
BLANKS += [
    "<tool_call>" + "</tool_call" * (LONG // 11),
    "</tool_call>" * (LONG // 12),
    "\n\u2003" * (LONG // 2),
]
ANSWERS = [
    r"\boxed" + " " * LONG,
    r"\boxed " * (LONG // 7),
    r"\boxed{" * (LONG // 7),
    "\\" * LONG,
    "#" * LONG,
    "1" * LONG,
]
ANSWERS += [
    "1" + " " * LONG,
    "1 " * (LONG // 2),
    "#### 1" + " a" * (LONG // 2) + "!",
    "1 ab" * (LONG // 4),
]


@pytest.mark.parametrize("text", BLANKS + ANSWERS, ids=lambda text: repr(text[:12]))
def test_time_grows_with_the_text_alone(text):
    began = time.process_time()
    assert all(map(str, calls_in(text)))
    final_answer(text)
    UNIT.sub("", text)
    exact_match([""], [text], ["1"])
    word_overlap([""], [text], ["1"])
    assert time.process_time() - began < 5


def test_calls_are_those_of_the_pattern():
    text = "a<tool_call>\n {1} </tool_call><tool_call><tool_call>2</tool_call></tool_call><tool_call></tool_call>"
    text += "<tool_call>"
    assert [*calls_in(text)] == ["{1}", "<tool_call>2", ""]


def test_an_observation_that_cannot_have_room_is_not_tokenized(observes, tokenizer):
    class Loud(OneTurn):
        def step(self, text):
            return "y" * 10**8, 0.0, False

    asked = []

    def observe(text, last, given, room):
        asked.append((len(text), room))
        return observes[0](text, last, given, room=room)

    sampler = TrajectorySampler(
        None, None, tokenizer, Environments("Loud", Loud), observe, max_turns=2, longest=600
    )
    assert longest_text(600) == SHORT < longest_text(1000) == 16_000
    began = time.process_time()
    assert sampler.observed("y" * 10**8, -1, 600, "") is None
    assert sampler.observed("y" * 601, -1, 600, "") is None
    assert asked == [(601, 600)]
    assert len(sampler.observed("y" * 599, -1, 600, "")) == 599
    for own in observes:
        assert len(own("y" * 10**8, -1, room=600)) < SHORT + 100
        assert own("y " * 4000, -1, room=600) == own("y " * 4000, -1)
    assert time.process_time() - began < 10
    Loud.reset = lambda self: "y" * 10**7
    with pytest.raises(
        FunctionError,
        match=r"Loud.reset has returned 10000000 characters, more than there is room for",
    ):
        sampler([Prompt("", [1])], 2, 0)


def test_halves_of_pairs_are_replaced_and_nothing_else(observes, tokenizer):
    for text, read in {
        "a\ud83d": "a\ufffd",
        "\ude00b": "\ufffdb",
        "\ud83d" + "\ude00": "\U0001f600",
        "\ufeffé": "\ufeffé",
    }.items():
        assert observes[0](text, -1) == tokenizer(read).input_ids


REFUSED = [
    10**400,
    1e39,
    float("nan"),
    float("-inf"),
    "1",
    None,
    10**5000,
    {"score": 10**400},
    {"bonus": 1.0},
    {3: 1.0},
]


@pytest.mark.parametrize(
    "reward", REFUSED, ids=lambda reward: repr(type(reward)) + str(REFUSED.index(reward))
)
def test_rewards_that_no_number_of_fp32_holds_are_named_or_end_their_trajectory(reward):
    class Overflows(OneTurn):
        def step(self, text):
            return "x", reward, False

    environments = Environments("m:Overflows", Overflows)
    made, _ = environments.begin([{}])
    with pytest.raises(FunctionError, match=r"m:Overflows\.step"):
        environments.step(made, ["text"])
    environments.survives = True
    (step,) = environments.step(made, ["text"])
    assert (step.done, step.rewards) == (True, {})
    assert step.failure.startswith("m:Overflows.step")


@pytest.mark.parametrize(
    "weights",
    [["score"], {"score": "1"}, {"score": float("nan")}, {3: 1.0}, {"a": 10**400}, "score"],
)
def test_weights_of_rewards_are_checked_when_the_environment_is_loaded(weights):
    with pytest.raises(
        UserError,
        match=r"the environment m:Weighs: (the weight of the reward|rewards must be a dict)",
    ):
        Environments("m:Weighs", type("Weighs", (OneTurn,), {"rewards": weights}))


@pytest.mark.parametrize("failing", ["__init__", "reset"])
@pytest.mark.parametrize("error", [ConnectionError("no room"), SystemExit(1), KeyboardInterrupt()])
def test_all_that_were_made_are_closed_if_one_does_not_begin(failing, error):
    made, closed = [], []

    class Room(OneTurn):
        def __init__(self):
            if failing == "__init__" and len(made) == 5:
                raise error
            made.append(self)

        async def reset(self):
            if failing == "reset" and self is made[5]:
                raise error

        def close(self):
            closed.append(self)

    sampler = TrajectorySampler(
        None, None, None, Environments("Room", Room), None, max_turns=1, longest=9
    )
    with pytest.raises(
        KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else FunctionError
    ):
        sampler([Prompt("p", [1], n) for n in range(4)], 2, 0)
    assert closed == made
    assert len(made) == (8 if failing == "reset" else 5)


class Late(OneTurn):
    def step(self, text):
        return asyncio.sleep(30 if text == "late" else 0, ("x", 1.0, False))


class Down(OneTurn):
    def step(self, text):
        raise ConnectionError("the sandbox is down")


def test_one_that_is_late_ends_its_trajectory_alone_and_names_its_option(monkeypatch):
    environments = Environments("m:Late", Late, timeout=0.3)
    made, _ = environments.begin([{}, {}])
    late = r"m:Late has not returned after 0\.3 s \(--environment_timeout\)"
    with pytest.raises(FunctionError, match=late):
        environments.step(made, ["late", "text"])
    environments.survives = True
    first, second = environments.step(made, ["late", "text"])
    assert (first.done, first.failure) == (
        True,
        "m:Late has not returned after 0.3 s (--environment_timeout)",
    )
    assert (second.observation, second.failure) == ("x", "")


def test_a_run_whose_environments_all_fail_says_so_once(tiny_model, workplace, capsys):
    train(
        games(tiny_model, "run", environment_errors="end"), environment=Down, reward="environment"
    )
    assert all(line["environment_failures"] > 0 for line in metrics("run"))  # other turns were cut
    said = capsys.readouterr().err
    assert said.count("trajectories that have asked it (--environment_errors end): ") == 1
    assert "ConnectionError: the sandbox is down" in said
