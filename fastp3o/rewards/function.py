"""A user's Python function of texts, and of further columns of the data, as a reward."""

import inspect
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import deepcopy
from functools import partial
from inspect import Parameter
from math import nan
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fastp3o.calls.function import FunctionError, call_for_list, import_function
from fastp3o.errors import UserError, text_of
from fastp3o.rollouts.groups import AtTokens, Group, Prompt, Response, texts, texts_or_messages

__all__ = ["compares_siblings"]

SIBLINGS = "compares_siblings"
BY_NAME = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)


def compares_siblings(function: Callable) -> Callable:
    """Marks a reward function that compares the responses to a prompt with one another. It gets
    those of a prompt next to each other, as many as a prompt has: in evaluations one of the
    policy's and the rest a rival's.
    """
    setattr(function, SIBLINGS, True)
    return function


class UserFunction:
    """What functions of texts share: further parameters without a default are columns of the
    prompts' data, given by name. Parameters with a default, and `**columns`, get the columns of
    `--reward_columns`; `log_metric` is a function that logs a number by its name. It may be an
    `async def`.

    columns: those it must have. logged: by `log_metric`, until `logged_means` takes them.
    """

    in_trls_form = False

    def __init__(self, name: str, timeout: float | None, function: Callable, given: Iterable[str]):
        """timeout: seconds that a call may take. given: parameters that are no columns."""
        self.name, self.timeout, self.function = name, timeout, function
        parameters = signature_of(function).parameters
        kinds = {name: parameter.kind for name, parameter in parameters.items()}
        self.takes_all = Parameter.VAR_KEYWORD in kinds.values()
        self.logs = "log_metric" in kinds
        by_name = {name for name, kind in kinds.items() if kind in BY_NAME}
        self.optional = by_name - {*given, "log_metric", "completion_ids"}
        self.columns = [
            name for name, p in parameters.items() if name in self.optional and p.default is p.empty
        ]
        self.logged: list[tuple[str, float]] = []

    def by_name(self, prompts: Sequence[Prompt]) -> dict[str, Any]:
        """Columns of these prompts, and `log_metric`, as far as the function takes them. Raises
        UserError if a column is missing.
        """
        # A copy for each: a function may change what it gets.
        columns: dict[str, Any] = {
            name: [deepcopy(prompt.columns[name]) for prompt in prompts]
            for name in prompts[0].columns
            if self.takes_all or name in self.optional
        }
        if missing := [name for name in self.columns if name not in columns]:
            raise UserError(
                f"{self.name} asks for the columns {', '.join(missing)}, which the rollouts do not have"
            )
        if self.logs:
            columns["log_metric"] = lambda name, value: self.logged.append((name, float(value)))
        return columns


class FunctionReward(UserFunction):
    """`function(prompts: list[str], responses: list[str], ...) -> list[float]`, given as
    `module:function`.

    It gets all P K responses, and a list of the same length with the prompt of each. None in the
    place of all numbers of a prompt's responses says that the reward does not apply to it: it is 0
    there. In a cascade, None leaves a response to the next reward. A list of numbers in the place
    of one rewards tokens: one for each id of `completion_ids`, which it may ask for.

    TRL's form, `function(completions, **kwargs)`, is called as TRL does: with `prompts`,
    `completions`, which are messages where the record's prompt is, `completion_ids` and
    `log_metric` by name.
    """

    def __init__(self, name: str, timeout: float | None = None, function: Callable | None = None):
        """timeout: seconds that a call may take. function: itself, instead of importing the name.
        Raises ValueError if there is no such function, or it does not take prompts and responses.
        """
        function = import_function(name, "reward function") if function is None else function
        signature = signature_of(function)
        kinds = {name: parameter.kind for name, parameter in signature.parameters.items()}
        takes_all = Parameter.VAR_KEYWORD in kinds.values()
        # Whether TRL could call it, with `completions` and much else by name.
        in_trls_form = takes_all and kinds.get("completions") in BY_NAME
        names = (
            ["prompts", "completions", "completion_ids"]
            if in_trls_form
            else first_two(signature, name)
        )
        super().__init__(name, timeout, function, names)
        self.compares_siblings = getattr(function, SIBLINGS, False)
        self.in_trls_form, self.logs = in_trls_form, self.logs or in_trls_form
        self.takes_ids = "completion_ids" in kinds or in_trls_form
        if in_trls_form:
            self.function = lambda prompts, texts, **more: function(
                prompts=prompts, completions=texts, **more
            )
        # Whether None leaves a response to the next reward of a cascade, as NaN.
        self.passes = False
        # the answers of the last call that are lists, None in place of others
        self.of_tokens: list[Any] = []

    def check(self, prompt: Prompt, siblings: int = 1) -> None:
        """Asks for the reward of a response to a prompt, the word "response"; or of as many
        siblings as a prompt has responses, if it compares them. Raises as a call does.
        """
        # Functions that look at tokens may rely on one.
        response = Response(prompt.ids[-1:], "response", True)
        self([Group(prompt, [response] * (siblings if self.compares_siblings else 1))])
        self.logged.clear()

    def __call__(self, groups: list[Group]) -> Tensor:
        """Raises FunctionError if the function fails, or does not return one number a response."""
        further = self.by_name([group.prompt for group in groups for _ in group.responses])
        responses = [response for group in groups for response in group.responses]
        if self.takes_ids:
            further["completion_ids"] = [list(response.ids) for response in responses]
        function = partial(self.function, **further)
        texts_or_chats = texts_or_messages(groups) if self.in_trls_form else texts(groups)
        returned = call_for_list(function, self.name, *texts_or_chats, timeout=self.timeout)

        # None for all responses to a prompt: the function says nothing of it.
        siblings = len(groups[0].responses)
        for start in range(0, len(returned), siblings):
            of_prompt = slice(start, start + siblings)
            if all(value is None for value in returned[of_prompt]):
                returned[of_prompt] = [nan if self.passes else 0.0] * siblings

        # A list has a number for each token of its response; a reward is their sum.
        self.of_tokens = [value if isinstance(value, list | tuple) else None for value in returned]
        for values, response in zip(self.of_tokens, responses, strict=True):
            if values is not None and len(values) != len(response.ids):
                raise FunctionError(
                    f"{self.name} must return as many numbers for a response as it has completion_ids"
                )
        try:
            returned = [
                sum(value) if isinstance(value, list | tuple) else value for value in returned
            ]
            return torch.tensor(returned, dtype=torch.float32).view(len(groups), siblings)
        except BaseException as error:  # of an entry's own __float__, too
            kinds = ", ".join(sorted({type(value).__name__ for value in returned}))
            wrong = f"must return a number for each response: {text_of(error)} (got {kinds})"
            raise FunctionError(f"{self.name} {wrong}") from error

    def at_tokens(self, groups: list[Group]) -> Iterator[AtTokens]:
        """The rewards of tokens in the last call."""
        answers = iter(self.of_tokens)
        for p, group in enumerate(groups):
            for k, response in enumerate(group.responses):
                if numbers := next(answers):
                    yield AtTokens(p, k, response.own_places, np.array(array("d", numbers)))


def signature_of(function: Callable) -> inspect.Signature:
    try:
        return inspect.signature(function)
    except ValueError:  # a builtin's
        return inspect.signature(lambda prompts, responses: None)


def first_two(signature: inspect.Signature, name: str) -> list[str]:
    """The names of the parameters for prompts and responses. Raises UserError if there are none."""
    parameters = list(signature.parameters.values())
    positional = [
        p
        for p in parameters
        if p.kind in (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
    ]
    names = [p.name for p in positional]
    nameless = any(
        p.kind == Parameter.POSITIONAL_ONLY and p.default is Parameter.empty for p in positional[2:]
    )
    misplaced = (
        nameless
        or "prompts" in names[1:]
        or not {"responses", "completions"}.isdisjoint([*names[:1], *names[2:]])
    )
    taken = len(positional) >= 2 or any(p.kind == Parameter.VAR_POSITIONAL for p in parameters)
    if misplaced or not taken:
        raise UserError(
            f"the reward function {name} must take prompts and responses first, in this order, and columns of the data "
            f"after them, by name; or, as in TRL, completions and **kwargs; it takes {signature}"
        )
    return names[:2]
