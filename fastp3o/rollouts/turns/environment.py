"""A user's environment, and how a run calls it.

    class Guess:
        rewards = {"found": 1.0, "bits": 0.5}  # optional: names of rewards, with their weights

        def reset(self, secret): ...           # columns of the prompt's record by name; may return a first observation
        def step(self, text): ...              # returns (observation, reward or rewards by name, done)
        def close(self): ...                   # optional

There is one object for each trajectory. Methods may be `async def`: those of one round of turns run
together.
"""

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from functools import partial
from math import nan
from numbers import Real
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedTokenizerBase

from fastp3o.calls.function import (
    FunctionError,
    FunctionInterruptedError,
    call_for_list,
    import_function,
    raised_by_itself,
    told,
)
from fastp3o.config import EnvironmentConfig
from fastp3o.errors import UserError, shown
from fastp3o.rollouts.turns.calls import ReadCalls, call_reader
from fastp3o.rollouts.turns.tools import load_tools, tool_environment
from fastp3o.sources import InMemory

SCORE = "score"  # the name of a reward that is a plain number
LARGEST = torch.finfo(torch.float32).max


# --- answers --------------------------------------------------------------------------------------


class Step(NamedTuple):
    """The answer of an environment to a turn. rewards: by name. failure: what it raised, in words;
    "" if nothing.
    """

    observation: str
    rewards: Mapping[str, float]
    done: bool
    failure: str = ""


class Failure(NamedTuple):
    """Why an environment did not answer."""

    why: str


# --- environments of a round ----------------------------------------------------------------------


class Environments:
    """Makes and calls the environments of trajectories.

    name: in messages. make: a class. timeout: seconds that all calls of a round of turns may take.
    survives: whether an environment whose `step` raises, is late or gives a wrong answer ends its
    trajectory alone, and not the run. read_calls: of a turn, for environments whose `step` gets
    these in place of its text. weights: of rewards, by name. columns: of the prompts' records
    that `reset` asks for.
    """

    def __init__(
        self,
        name: str,
        make: Callable[[], Any],
        *,
        timeout: float | None = None,
        survives: bool = False,
        read_calls: ReadCalls | None = None,
    ):
        self.name, self.make, self.timeout, self.survives = name, make, timeout, survives
        self.read_calls = read_calls
        self.weights = reward_weights(name, getattr(make, "rewards", None) or {SCORE: 1.0})
        if not callable(getattr(make, "reset", None)) or not callable(getattr(make, "step", None)):
            raise UserError(
                f"the environment {name} must be a class with the methods reset and step"
            )
        parameters = list(inspect.signature(make.reset).parameters.values())[1:]  # type: ignore[attr-defined]
        by_name = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        self.taken = {p.name for p in by_name}
        self.columns = [p.name for p in by_name if p.default is p.empty and p.name != "prompt"]

    def begin(self, records: Sequence[Mapping[str, Any]]) -> tuple[list[Any], list[str]]:
        """Environments for these records, with their first observations, "" for none. Raises
        FunctionError if one fails to begin, once those that were made are closed: there is nothing
        to compare with the others of its prompt.
        """
        made, texts = dict[int, Any](), dict[int, Any]()
        try:
            self.call(dict.fromkeys(range(len(records)), self.make), made, survives=False)
            resets = {n: self.reset(made[n], record) for n, record in enumerate(records)}
            self.call(resets, texts, survives=False)
            for text in texts.values():
                if not isinstance(text, str | None):
                    raise FunctionError(
                        f"{self.name}.reset must return text or None, got a {type(text).__name__}"
                    )
        except BaseException:
            self.close(list(made.values()))
            raise
        return [made[n] for n in range(len(records))], [texts[n] or "" for n in range(len(records))]

    def reset(self, environment: Any, record: Mapping[str, Any]) -> Callable[[], Any]:
        """The call of the environment's `reset`, with copies of the record's fields: an environment
        may change them.
        """
        return partial(
            environment.reset,
            **{name: deepcopy(record[name]) for name in self.taken & record.keys()},
        )

    def step(self, environments: Sequence[Any], turns: Sequence[Any]) -> list[Step]:
        """turns: what each environment's `step` gets. Raises FunctionError for an answer that is
        none, and for one that raises or takes too long, unless environments survive that: then it
        is a failed Step, as are those that a late one has kept from being asked.
        """
        answers: dict[int, Any] = {}
        pairs = enumerate(zip(environments, turns, strict=True))
        calls = {n: partial(environment.step, turn) for n, (environment, turn) in pairs}
        try:
            self.call(calls, answers, survives=self.survives)
        except (FunctionError, FunctionInterruptedError) as error:
            if not (self.survives and raised_by_itself(error)):
                raise
            answers = dict.fromkeys(calls, Failure(str(error))) | answers
        return [self.checked(answers[n]) for n in calls]

    def close(self, environments: Sequence[Any]) -> None:
        calls = [environment.close for environment in environments if hasattr(environment, "close")]
        with suppress(FunctionError):  # the trajectories are over
            self.call(dict(enumerate(calls)), {}, survives=True)

    def call(
        self, calls: Mapping[int, Callable[[], Any]], answers: dict[int, Any], *, survives: bool
    ) -> None:
        """Makes calls, and puts what they return into `answers`. survives: a Failure where one
        raises.
        """
        together = partial(called_together, calls, answers, survives=survives)
        option = "--environment_timeout"
        call_for_list(together, self.name, list(calls), timeout=self.timeout, option=option)

    def checked(self, answer: object) -> Step:
        step = answer if isinstance(answer, Failure) else self.read(answer)
        return Step("", {}, True, step.why) if isinstance(step, Failure) else step

    def read(self, answer: object) -> Step | Failure:
        if not isinstance(answer, tuple) or len(answer) != 3:
            return self.wrong(f"step must return (observation, reward, done), got {shown(answer)}")
        observation, reward, done = answer
        if not isinstance(done, bool) and type(done).__name__ != "bool":  # numpy's
            return self.wrong(f"step: done must be True or False, got {shown(done)}")
        if not (isinstance(observation, str) or (done and observation is None)):
            return self.wrong(f"step: the observation must be text, got {shown(observation)}")
        rewards = {}
        for name, value in reward.items() if isinstance(reward, Mapping) else [(SCORE, reward)]:
            if name not in self.weights:
                return self.wrong(
                    f"step gives the reward {shown(name)}, and declares {sorted(self.weights)}"
                )
            if (number := finite(value)) is None:
                return self.wrong(
                    f"step: the reward {name} must be a finite number of fp32, got {shown(value)}"
                )
            rewards[name] = number
        return Step(observation or "", rewards, bool(done))

    def wrong(self, what: str) -> Failure:
        """A Failure for a wrong answer, which the text of a policy may have caused; raises
        FunctionError unless environments survive failures.
        """
        if not self.survives:
            raise FunctionError(f"{self.name}.{what}")
        return Failure(f"{self.name}.{what}")


# --- what an environment says of its rewards ------------------------------------------------------


def finite(value: object) -> float | None:
    """The value as a number that fp32 can hold; None for anything else."""
    try:
        number = float(value) if isinstance(value, Real) else nan
    except Exception:  # OverflowError of an integer, or what a type of the user's raises
        return None
    return number if abs(number) <= LARGEST else None


def reward_weights(name: str, rewards: object) -> dict[str, float]:
    """The weights of rewards by name. Raises UserError for anything else than a dict of names and
    finite weights.
    """
    weights: dict[str, float] = {}
    for one, weight in rewards.items() if isinstance(rewards, Mapping) else ():
        number = finite(weight)
        if not isinstance(one, str) or number is None:
            raise UserError(
                f"the environment {name}: the weight of the reward {shown(one)} is not a finite number"
            )
        weights[one] = number
    if not weights:
        raise UserError(
            f"the environment {name}: rewards must be a dict of names and weights, got {shown(rewards)}"
        )
    return weights


# --- loading and calling --------------------------------------------------------------------------


def load_environments(
    config: EnvironmentConfig, tokenizer: PreTrainedTokenizerBase | None = None
) -> Environments:
    """The configuration's environment, or the one of its tools. tokenizer: the policy's, for
    reading the calls of its turns; whoever only asks for weights and columns needs none.
    """
    limits: dict[str, Any] = {
        "timeout": config.environment_timeout,
        "survives": config.environment_errors == "end",
    }
    if config.tools:
        tools = load_tools(config.tools)
        if tokenizer is not None:
            limits["read_calls"] = call_reader(tokenizer, [tool.schema for tool in tools])
        return Environments(str(config.tools), tool_environment(tools), **limits)
    name = config.environment or ""
    make = name.value if isinstance(name, InMemory) else import_function(name, "environment")
    return Environments(str(name), make, **limits)


def called_together(
    calls: Mapping[int, Callable[[], Any]],
    answers: dict[int, Any],
    numbers: list[int],
    *,
    survives: bool,
) -> Any:
    """Makes the calls and puts their results into `answers`. Returns the numbers of the calls, or a
    coroutine that does all of this.
    """

    def failed(number: int, error: BaseException) -> None:
        if not (survives and raised_by_itself(error)):
            raise error
        answers[number] = Failure(told(error))

    waiting = {}
    for number, call in calls.items():
        try:
            answer = call()
        except BaseException as error:  # a user's code may raise anything
            failed(number, error)
            continue
        if inspect.isawaitable(answer):
            waiting[number] = answer
        else:
            answers[number] = answer
    if not waiting:
        return numbers

    async def settle(number: int) -> None:
        try:
            answers[number] = await waiting[number]
        except BaseException as error:
            failed(number, error)

    async def all_of_them() -> list[int]:
        await asyncio.gather(*map(settle, waiting))
        return numbers

    return all_of_them()
