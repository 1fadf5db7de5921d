"""A user's Python function of texts, and of further columns of the data, as a reward."""

import inspect
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from inspect import Parameter
from typing import Any

import torch
from torch import Tensor

from fastp3o.errors import UserError
from fastp3o.named_function import FunctionError, call_for_list, import_function
from fastp3o.rollouts.groups import Group, Prompt, Response, texts


class FunctionReward:
    """`function(prompts: list[str], responses: list[str], ...) -> list[float]`, given as `module:function`.

    It gets all P K responses, and a list of the same length with the prompt of each. Further parameters without a
    default are columns of the prompts' data, given by name as lists of that length. Parameters with a default, and
    `**columns`, get the columns of `--reward_columns`. It may be an `async def`, or as TRL's,
    `function(completions, **kwargs)`. None in the place of all numbers of a prompt's responses says that the reward
    does not apply to it: it is 0 there.
    """

    def __init__(self, name: str, timeout: float | None = None, function: Callable | None = None):
        """timeout: seconds that a call may take. function: itself, instead of importing the name.

        Raises ValueError if there is no such function, or it does not take prompts and responses.
        """
        self.name, self.timeout = name, timeout
        function = import_function(name, "reward function") if function is None else function
        self.function = as_in_trl(function) or function
        parameters = further_parameters(self.function, name)
        self.columns = [p.name for p in parameters if p.kind != Parameter.VAR_KEYWORD and p.default is Parameter.empty]
        self.optional = {p.name for p in parameters}
        self.takes_all = any(p.kind == Parameter.VAR_KEYWORD for p in parameters)

    def check(self, prompt: Prompt) -> None:
        """Asks for the reward of a response to a prompt, the word "response". Raises as a call does."""
        self([Group(prompt, [Response([], "response", True)])])

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
        function = partial(self.function, **columns)
        returned = call_for_list(function, self.name, *texts(groups), timeout=self.timeout)
        responses = len(groups[0].responses)
        for start in range(0, len(returned), responses):
            if all(value is None for value in returned[start : start + responses]):
                returned[start : start + responses] = [0.0] * responses
        try:
            return torch.tensor(returned, dtype=torch.float32).view(len(groups), responses)
        except Exception as error:
            raise FunctionError(f"{self.name} must return a number for each response: {error}") from error


def as_in_trl(function: Callable) -> Callable | None:
    """A function of TRL's form, `(completions, **kwargs)`, as one of prompts and responses; None for any other."""
    try:
        parameters = [*inspect.signature(function).parameters.values()]
    except ValueError:
        return None
    takes_all = any(p.kind == Parameter.VAR_KEYWORD for p in parameters)
    if not parameters or parameters[0].name != "completions" or not takes_all:
        return None

    def renamed(prompts: list[str], responses: list[str], **columns: list) -> Any:
        return function(completions=responses, prompts=prompts, **columns)

    first = [Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in ("prompts", "responses")]
    others = [p for p in parameters if p.name not in ("completions", "prompts")]
    others = [p if p.kind == Parameter.VAR_KEYWORD else p.replace(kind=Parameter.KEYWORD_ONLY) for p in others]
    renamed.__signature__ = inspect.Signature([*first, *others])  # type: ignore[attr-defined]
    return renamed


def further_parameters(function: Callable, name: str) -> list[Parameter]:
    """Parameters after prompts and responses that can be given by name; none if the function has no signature."""
    try:
        signature = inspect.signature(function)
    except ValueError:
        return []
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
            f"after them, by name; it takes {signature}"
        )
    by_name = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY, Parameter.VAR_KEYWORD)
    return [p for p in parameters if p not in positional[:2] and p.kind in by_name]
