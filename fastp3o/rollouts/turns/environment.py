"""A user's environment, and how a run calls it.

    class Guess:
        rewards = {"found": 1.0, "bits": 0.5}  # optional: names of rewards, with their weights

        def reset(self, secret): ...           # columns of the prompt's record by name; may return a first observation
        def step(self, text): ...              # returns (observation, reward or rewards by name, done)
        def close(self): ...                   # optional

There is one object for each trajectory. Methods may be `async def`: those of one round of turns run together.
"""

import asyncio
import inspect
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from functools import partial
from math import isfinite
from numbers import Real
from typing import Any, NamedTuple

from fastp3o.config import EnvironmentConfig, Named
from fastp3o.errors import UserError, text_of
from fastp3o.named_function import FunctionError, call_for_list, import_function

SCORE = "score"  # the name of a reward that is a plain number


class Step(NamedTuple):
    """The answer of an environment to a turn. rewards: by name. failure: what it raised, in words; "" if nothing."""

    observation: str
    rewards: Mapping[str, float]
    done: bool
    failure: str = ""


class Environments:
    """Makes and calls the environments of trajectories.

    name: in messages. make: a class. timeout: seconds that all calls of a round of turns may take. survives: whether an
    environment that raises ends its trajectory alone, and not the run. weights: of rewards, by name. columns: of the
    prompts' records that `reset` asks for.
    """

    def __init__(self, name: str, make: Callable[[], Any], *, timeout: float | None = None, survives: bool = False):
        self.name, self.make, self.timeout, self.survives = name, make, timeout, survives
        self.weights = dict(getattr(make, "rewards", None) or {SCORE: 1.0})
        if not callable(getattr(make, "reset", None)) or not callable(getattr(make, "step", None)):
            raise UserError(f"the environment {name} must be a class with the methods reset and step")
        parameters = list(inspect.signature(make.reset).parameters.values())[1:]  # type: ignore[attr-defined]
        by_name = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        self.taken = {p.name for p in by_name}
        self.columns = [p.name for p in by_name if p.default is p.empty and p.name != "prompt"]

    def begin(self, records: Sequence[Mapping[str, Any]]) -> tuple[list[Any], list[str]]:
        """Environments for these records, with their first observations, "" for none. Raises FunctionError."""
        made = self.call(lambda records: [self.make() for _ in records], list(records))
        # A copy for each: an environment may change what it gets.
        calls = [
            partial(environment.reset, **{name: deepcopy(record[name]) for name in self.taken & record.keys()})
            for environment, record in zip(made, records, strict=True)
        ]
        texts = self.call(partial(called_together, survives=False), calls)
        for text in texts:
            if not isinstance(text, str | None):
                raise FunctionError(f"{self.name}.reset must return text or None, got a {type(text).__name__}")
        return made, [text or "" for text in texts]

    def step(self, environments: Sequence[Any], turns: Sequence[str]) -> list[Step]:
        """Raises FunctionError for an answer that is none, and for one that raises or takes too long."""
        calls = [partial(environment.step, turn) for environment, turn in zip(environments, turns, strict=True)]
        return list(map(self.checked, self.call(partial(called_together, survives=self.survives), calls)))

    def close(self, environments: Sequence[Any]) -> None:
        calls = [environment.close for environment in environments if hasattr(environment, "close")]
        with suppress(FunctionError):  # the trajectories are over
            self.call(partial(called_together, survives=True), calls)

    def call(self, function: Callable[[list], Any], arguments: list) -> list:
        return call_for_list(function, self.name, arguments, timeout=self.timeout)

    def checked(self, answer: object) -> Step:
        if isinstance(answer, Step):
            return answer
        if not isinstance(answer, tuple) or len(answer) != 3:
            raise FunctionError(f"{self.name}.step must return (observation, reward, done), got {answer!r:.80}")
        observation, reward, done = answer
        if not isinstance(done, bool) and type(done).__name__ != "bool":  # numpy's
            raise FunctionError(f"{self.name}.step: done must be True or False, got {done!r:.80}")
        if not (isinstance(observation, str) or (done and observation is None)):
            raise FunctionError(f"{self.name}.step: the observation must be text, got {observation!r:.80}")
        rewards = reward if isinstance(reward, Mapping) else {SCORE: reward}
        for name, value in rewards.items():
            if name not in self.weights:
                raise FunctionError(f"{self.name}.step gives the reward {name!r}, and declares {sorted(self.weights)}")
            if not isinstance(value, Real) or not isfinite(value):
                raise FunctionError(f"{self.name}.step: the reward {name} must be a finite number, got {value!r:.80}")
        return Step(observation or "", {name: float(value) for name, value in rewards.items()}, bool(done))


def load_environments(config: EnvironmentConfig) -> Environments:
    name = config.environment or ""
    make = name.content if isinstance(name, Named) else import_function(name, "environment")
    survives = config.environment_errors == "end"
    return Environments(str(name), make, timeout=config.environment_timeout, survives=survives)


def called_together(calls: Sequence[Callable[[], Any]], *, survives: bool) -> Any:
    """The results of calls, or one coroutine of them all. survives: an error becomes the Step of a failure."""

    def failed(error: Exception) -> Step:
        if not survives:
            raise error
        last = traceback.extract_tb(error.__traceback__)[-1]
        return Step("", {}, True, f"{last.filename}, line {last.lineno}: {type(error).__name__}: {text_of(error)}")

    results = []
    for call in calls:
        try:
            results.append(call())
        except Exception as error:  # a user's code may raise anything
            results.append(failed(error))
    if not any(map(inspect.isawaitable, results)):
        return results

    async def settled(result: Any) -> Any:
        try:
            return await result if inspect.isawaitable(result) else result
        except Exception as error:
            return failed(error)

    async def all_of_them() -> list:
        return await asyncio.gather(*map(settled, results))

    return all_of_them()
