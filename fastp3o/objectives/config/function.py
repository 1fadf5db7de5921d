"""Options of an objective that is a Python function, and what such a function takes."""

from collections.abc import Callable, Mapping
from functools import cached_property, partial
from inspect import Parameter, isfunction, signature
from typing import Any, ClassVar, Literal

from fastp3o.calls.function import import_function
from fastp3o.config import Condition, Needs, Rule, option, required
from fastp3o.errors import UserError
from fastp3o.objectives.config.base import ONE_STEP_RATE, OnlineConfig, RewardScalingConfig
from fastp3o.sources import InMemory

# What a function gets by the names of its parameters, beside the groups, which come first.
OF_TOKENS = ("old_tokens", "ref_tokens", "sampler_tokens")  # [n]: log-probs, constants
# [n], of the same pass as the policy's log-probs (`TokenOutputs`).
OUTPUTS = (
    "entropy",
    "mean_logit",
    "is_top",
)
OF_RESPONSES = ("old", "ref", "rewards", "loss_mask")  # [P, K], constants
TENSORS = (*OF_TOKENS, *OUTPUTS, *OF_RESPONSES)

OF_REWARDS = (
    "reward_scaling reward_clip missing_eos_penalty length_penalty ngram_penalty overlong_margin"
)


def needs_parameter(name: str) -> Condition:
    return Condition(
        "objective",
        f"an --objective function that takes {name}",
        lambda config: name in config.tensors,
    )


class FunctionConfig(RewardScalingConfig, OnlineConfig):
    """An objective that is a function of groups of responses, as `fastp3o_kernels.linear_loss`
    takes it.

    It gets what it names as parameters, and nothing else. One step a round, unless you set
    --inner_epochs or --prompts_per_minibatch.
    """

    objective_class: ClassVar[str] = "function:FunctionObjective"
    sampler_correction: ClassVar[str] = "an objective that takes sampler_tokens"
    further_needs: ClassVar[Mapping[str, Needs]] = {
        **dict.fromkeys([*OF_REWARDS.split(), "dynamic_sampling"], needs_parameter("rewards")),
        "mask_truncated": needs_parameter("loss_mask"),
        "sampler_ratio_cap": Condition(
            "objective",
            "an objective of fastp3o: a function takes sampler_tokens, and weighs its losses by itself",
            lambda _: False,
        ),
    }
    instead: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(
            ("kl_coef", "beta"),
            "name ref or ref_tokens as a parameter of the function, which adds the KL to its loss",
        ),
        "entropy_coef": "name entropy as a parameter of the function",
    }
    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            ("sampler",),
            lambda config: config.reads_sampler and config.sampler == "transformers",
            "--objective {objective} takes sampler_tokens, and --sampler transformers gives none",
        ),
    )

    objective: str | InMemory = required(  # type: ignore[assignment]  # all others have a name
        "Function of groups of responses, as module:function. Its further parameters name what it takes: "
        f"{', '.join(TENSORS)}."
    )
    loss_mean: Literal["prompt", "token"] = option(
        "prompt",
        "What the function's sum over a minibatch is divided by. prompt: the number of prompts. token: that of tokens "
        "in responses that take part (DAPO).",
    )
    learning_rate: float = ONE_STEP_RATE
    prompts_per_minibatch: int = 0
    inner_epochs: int = 1

    @cached_property
    def function(self) -> Callable[..., Any] | None:
        """The function; None before it has come. Raises UserError if it cannot be imported."""
        if isinstance(self.objective, InMemory):
            return self.objective.value
        return import_function(self.objective, "objective") if self.objective else None

    @cached_property
    def tensors(self) -> tuple[str, ...]:
        """Names of the tensors that the function takes. Before it has come all of them, so that
        nothing is refused.
        """
        return (
            TENSORS if self.function is None else named_tensors(str(self.objective), self.function)
        )

    @property
    def reads_rewards(self) -> bool:
        return "rewards" in self.tensors

    @property
    def reads_sampler(self) -> bool:
        return self.function is not None and "sampler_tokens" in self.tensors

    @property
    def compares_with_old(self) -> bool:
        if self.function is None:  # no option that is about the ratio is refused before it has come
            return self.old_logprobs == "sampler"
        return not {"old", "old_tokens"}.isdisjoint(self.tensors)

    @property
    def loss_reads_reference(self) -> bool:
        return not {"ref", "ref_tokens"}.isdisjoint(self.tensors)


def innermost(function: Any) -> Any:
    """What a `functools.partial` calls in the end."""
    while isinstance(function, partial):
        function = function.func
    return function


def named_objective(function: Any) -> InMemory:
    """A function by its name as the command has it. Raises UserError for what is no function."""
    require_function("objective", function)
    plain = innermost(function)
    return InMemory(f"{plain.__module__}:{plain.__qualname__}", function)


def require_function(name: str, function: Any) -> None:
    """Raises UserError for a callable object, whose changes a resumed run would not see."""
    if not isfunction(plain := innermost(function)):
        raise UserError(
            f"{name} must be a function of groups, or functools.partial of one, got a {type(plain).__name__}"
        )


def named_tensors(name: str, function: Callable[..., Any]) -> tuple[str, ...]:
    """The tensors that a function's parameters after the first name. Others are its settings, and
    have a default. Raises UserError if it does not take groups first, or takes what there is not.
    """
    require_function(name, function)
    parameters = [*signature(function).parameters.values()]
    takes = f"{name} takes {signature(function)}"
    positional = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
    if not parameters or parameters[0].kind not in positional or parameters[0].name in TENSORS:
        raise UserError(
            f"the objective must take groups of responses first (`fastp3o_kernels.Groups`), and {takes}"
        )
    others = parameters[1:]
    unknown = [one for one in others if one.name not in TENSORS and not is_setting(one)]
    if unknown:
        raise UserError(
            f"the objective {takes}, and there is no {', '.join(map(str, unknown))}: its parameters after the groups "
            f"are among {', '.join(TENSORS)}; settings of its own have a default"
        )
    return tuple(one.name for one in others if one.name in TENSORS)


def is_setting(parameter: Parameter) -> bool:
    by_name = parameter.kind in (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
    return by_name and parameter.default is not Parameter.empty
