"""A user's Python function of texts, and of further columns of the data, as a reward."""

import inspect
from array import array
from collections.abc import Callable, Iterator
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

BY_NAME = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)


class FunctionReward:
    """`function(prompts: list[str], responses: list[str], ...) -> list[float]`, given as `module:function`.

    It gets all P K responses, and a list of the same length with the prompt of each. Further parameters without a
    default are columns of the prompts' data, given by name as lists of that length. Parameters with a default, and
    `**columns`, get the columns of `--reward_columns`; `log_metric` is a function that logs a number by its name. It
    may be an `async def`. None in the place of all numbers of a prompt's responses says that the reward does not apply
    to it: it is 0 there. In a cascade, None leaves a response to the next reward. A list of numbers in the place of one
    rewards tokens: one for each id of `completion_ids`, which it may ask for.

    TRL's form, `function(completions, **kwargs)`, is called as TRL does: with `prompts`, `completions`, which are
    messages where the record's prompt is, `completion_ids` and `log_metric` by name.
    """

    def __init__(self, name: str, timeout: float | None = None, function: Callable | None = None):
        """timeout: seconds that a call may take. function: itself, instead of importing the name. Raises ValueError if
        there is no such function, or it does not take prompts and responses.
        """
        self.name, self.timeout = name, timeout
        function = import_function(name, "reward function") if function is None else function
        try:
            signature = inspect.signature(function)
        except ValueError:  # a builtin's
            signature = inspect.signature(lambda prompts, responses: None)
        parameters = signature.parameters
        kinds = {name: parameter.kind for name, parameter in parameters.items()}
        self.takes_all = Parameter.VAR_KEYWORD in kinds.values()
        # Whether TRL could call it, with `completions` and much else by name.
        self.in_trls_form = self.takes_all and kinds.get("completions") in BY_NAME
        if self.in_trls_form:
            first = ["prompts", "completions", "completion_ids"]
            self.function = lambda prompts, texts, **more: function(prompts=prompts, completions=texts, **more)
        else:
            first, self.function = first_two(signature, name), function
        self.logs = self.in_trls_form or "log_metric" in kinds
        self.takes_ids = "completion_ids" in kinds or self.in_trls_form
        by_name = {name for name, kind in kinds.items() if kind in BY_NAME}
        self.optional = by_name - {*first, "log_metric", "completion_ids"}
        self.columns = [name for name, p in parameters.items() if name in self.optional and p.default is p.empty]
        self.logged: list[tuple[str, float]] = []  # by `log_metric`, until `logged_means` takes them
        self.passes = False  # whether None leaves a response to the next reward of a cascade, as NaN
        self.of_tokens: list[Any] = []  # the answers of the last call that are lists, None in the place of others

    def check(self, prompt: Prompt) -> None:
        """Asks for the reward of a response to a prompt, the word "response". Raises as a call does."""
        # Functions that look at tokens may rely on one.
        self([Group(prompt, [Response(prompt.ids[-1:], "response", True)])])
        self.logged.clear()

    def __call__(self, groups: list[Group]) -> Tensor:
        """Raises FunctionError if the function fails, or does not return one number a response."""
        # A copy for each response: a function may change what it gets.
        columns = {
            name: [deepcopy(group.prompt.columns[name]) for group in groups for _ in group.responses]
            for name in groups[0].prompt.columns
            if self.takes_all or name in self.optional
        }
        if missing := [name for name in self.columns if name not in columns]:
            raise UserError(f"{self.name} asks for the columns {', '.join(missing)}, which the rollouts do not have")
        further: dict[str, Any] = {}
        if self.logs:
            further["log_metric"] = lambda name, value: self.logged.append((name, float(value)))
        if self.takes_ids:
            further["completion_ids"] = [list(response.ids) for group in groups for response in group.responses]
        function = partial(self.function, **columns | further)
        texts_or_chats = texts_or_messages(groups) if self.in_trls_form else texts(groups)
        returned = call_for_list(function, self.name, *texts_or_chats, timeout=self.timeout)
        responses = len(groups[0].responses)
        for start in range(0, len(returned), responses):
            if all(value is None for value in returned[start : start + responses]):
                returned[start : start + responses] = [nan if self.passes else 0.0] * responses
        ids = [response.ids for group in groups for response in group.responses]
        self.of_tokens = [value if isinstance(value, list | tuple) else None for value in returned]
        if any(values is not None and len(values) != len(its) for values, its in zip(self.of_tokens, ids, strict=True)):
            raise FunctionError(f"{self.name} must return as many numbers for a response as it has completion_ids")
        try:
            returned = [
                value if values is None else sum(values) for values, value in zip(self.of_tokens, returned, strict=True)
            ]
            return torch.tensor(returned, dtype=torch.float32).view(len(groups), responses)
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


def first_two(signature: inspect.Signature, name: str) -> list[str]:
    """The names of the parameters for prompts and responses. Raises UserError if there are none."""
    parameters = list(signature.parameters.values())
    positional = [p for p in parameters if p.kind in (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)]
    names = [p.name for p in positional]
    nameless = any(p.kind == Parameter.POSITIONAL_ONLY and p.default is Parameter.empty for p in positional[2:])
    misplaced = (
        nameless or "prompts" in names[1:] or not {"responses", "completions"}.isdisjoint([*names[:1], *names[2:]])
    )
    taken = len(positional) >= 2 or any(p.kind == Parameter.VAR_POSITIONAL for p in parameters)
    if misplaced or not taken:
        raise UserError(
            f"the reward function {name} must take prompts and responses first, in this order, and columns of the data "
            f"after them, by name; or, as in TRL, completions and **kwargs; it takes {signature}"
        )
    return names[:2]
