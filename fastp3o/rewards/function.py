"""A user's Python function of texts, and of what the data have beside them, as a reward."""

import inspect
from collections.abc import Callable
from inspect import Parameter
from numbers import Real

import torch
from torch import Tensor

from fastp3o.errors import UserError
from fastp3o.named_function import FunctionError, call_for_list, import_function
from fastp3o.rollouts.rollouts import Rollouts


class FunctionReward:
    """`function(prompts: list[str], responses: list[str], ...) -> list[float]`, given as `module:function`.

    It sees the P K responses one after the other, each beside its prompt. Further parameters without a default are
    columns of the prompts' data, of which it gets a list as long, by name; those with one, and `**columns`, get what
    else is kept (`--reward_columns`). It may be an `async def`.
    """

    def __init__(self, name: str):
        """Raises ValueError where there is no such function, or none that takes prompts and responses."""
        self.name = name
        self.function = import_function(name, "reward function")
        parameters = further_parameters(self.function, name)
        self.columns = [p.name for p in parameters if p.kind != Parameter.VAR_KEYWORD and p.default is Parameter.empty]
        self.optional = {p.name for p in parameters}
        self.takes_all = any(p.kind == Parameter.VAR_KEYWORD for p in parameters)

    def __call__(self, rollouts: Rollouts) -> Tensor:
        """[P, K] fp32. Raises FunctionError where the function fails, or does not return one number a response."""
        columns = {
            name: rollouts.beside_responses(values)
            for name, values in rollouts.columns.items()
            if self.takes_all or name in self.optional
        }
        if missing := [name for name in self.columns if name not in columns]:
            raise UserError(f"{self.name} asks for the columns {', '.join(missing)}, which the rollouts do not have")
        rewards = [
            self.number(reward, index)
            for index, reward in enumerate(call_for_list(self.function, self.name, *rollouts.texts(), **columns))
        ]
        return torch.tensor(rewards, dtype=torch.float32).view(len(rollouts), -1)

    def number(self, reward: object, index: int) -> float:
        """Text is no number, even if it reads like one."""
        if isinstance(reward, Tensor) and reward.numel() == 1:
            reward = reward.item()
        if not isinstance(reward, Real):
            raise FunctionError(f"{self.name}: reward {index} must be a number, got {reward!r:.80}")
        try:
            return float(reward)
        except OverflowError as error:
            raise FunctionError(f"{self.name}: reward {index} must be a number of fp32, got a larger one") from error


def further_parameters(function: Callable, name: str) -> list[Parameter]:
    """Those behind prompts and responses that can be given by name; none of a function that has no signature."""
    try:
        signature = inspect.signature(function)
    except ValueError:
        return []
    parameters = list(signature.parameters.values())
    positional = [p for p in parameters if p.kind in (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)]
    names = [p.name for p in positional]
    misplaced = "prompts" in names[1:] or not {"responses", "completions"}.isdisjoint([*names[:1], *names[2:]])
    taken = len(positional) >= 2 or any(p.kind == Parameter.VAR_POSITIONAL for p in parameters)
    if misplaced or not taken:
        raise UserError(
            f"the reward function {name} must take prompts and responses first, in this order, and columns of the data "
            f"behind them; it takes {signature}"
        )
    by_name = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY, Parameter.VAR_KEYWORD)
    return [p for p in parameters if p not in positional[:2] and p.kind in by_name]
