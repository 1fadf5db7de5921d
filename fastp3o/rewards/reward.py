"""Rewards by name, their weighted sum, and the penalties subtracted from it.

P prompts with K responses each. All values are tables [P, K] fp32 on the CPU.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor
from transformers import PreTrainedTokenizerBase
from transformers.utils.logging import get_logger

from fastp3o.calls.endpoint import EndpointError
from fastp3o.calls.function import FunctionError, FunctionInterruptedError
from fastp3o.config import EnvironmentConfig
from fastp3o.models.loaded import LoadedModel
from fastp3o.models.loading import load_reward_model, stored_vector_size
from fastp3o.models.packed_model import PackedModel
from fastp3o.models.sharding import loading_device
from fastp3o.models.tokenizer import load_tokenizer
from fastp3o.rewards.cascade import Cascade
from fastp3o.rewards.comparing_function import load_function
from fastp3o.rewards.comparisons import ComparisonCascade, JudgedPairs, RelativeReward
from fastp3o.rewards.config import (
    ENVIRONMENT,
    PenaltyConfig,
    RemoteConfig,
    RewardConfig,
    cascaded,
    is_endpoint,
    is_function,
)
from fastp3o.rewards.environment import EnvironmentReward
from fastp3o.rewards.function import FunctionReward, UserFunction
from fastp3o.rewards.model import ModelReward, PreferenceModelReward
from fastp3o.rewards.remote import RemoteReward
from fastp3o.rewards.rivals import AgainstRival
from fastp3o.rollouts.groups import Group, finished, lengths
from fastp3o.rollouts.turns.environment import load_environments
from fastp3o.rollouts.turns.tools import load_tools
from fastp3o.runtime.finiteness import NotFiniteError, require_finite
from fastp3o.runtime.precision import wider_precision
from fastp3o.sources import InMemory, Source
from fastp3o_kernels.losses import overlong_penalty

logger = get_logger(__name__)
Reward = Callable[[list[Group]], Tensor]

# The name of a table [P, K, longest] beside those of rewards: what comes at which of the policy's
# own tokens.
TOKEN_REWARDS = "token_rewards"
# The name of a table [P, K, K] beside them, where a reward compares: the rewards' difference in
# each pair.
PAIR_REWARDS = "pair_rewards"


# --- loading --------------------------------------------------------------------------------------


def load_reward(
    name: Source,
    policy_tokenizer: PreTrainedTokenizerBase,
    *,
    dtype: torch.dtype,
    load: Callable[..., PackedModel] = load_reward_model,
    remote: RemoteConfig | None = None,
    trust_remote_code: bool = False,
    **settings: Any,
) -> Reward:
    """Loads a reward, unless its name comes with it: `module:function` is a Python function,
    http(s)://... an endpoint, `environment` what a configuration's environment gives, and anything
    else the folder or hub name of a reward model or a preference model. load: what loads a reward
    model. remote: settings of endpoints and functions. settings: those of a ModelReward.
    """
    if isinstance(name, InMemory) and not isinstance(name.value, LoadedModel):
        return name.value
    if name == ENVIRONMENT and isinstance(remote, EnvironmentConfig) and remote.environment:
        return EnvironmentReward(load_environments(remote).weights)
    if is_endpoint(name):
        return RemoteReward(str(name), remote or RemoteConfig())
    if is_function(name):
        return load_function(str(name), (remote or RemoteConfig()).call_seconds)
    device = loading_device(settings["device"], settings.get("mesh"))
    size = stored_vector_size(name, trust_remote_code=trust_remote_code)
    model = load(
        name, vector_size=size, device=device, dtype=dtype, trust_remote_code=trust_remote_code
    )
    tokenizer = load_tokenizer(name, trust_remote_code=trust_remote_code)
    reward = (PreferenceModelReward if size else ModelReward)(
        model, tokenizer, policy_tokenizer, **settings
    )
    padding, ends = model.model.config.get_text_config().pad_token_id, reward.translate.ends
    if padding in (ends.text, ends.chat):
        logger.warning(
            f"{name} pads with {tokenizer.decode(padding)!r}, which ends responses: its scores are read there, and one "
            "token before by transformers, which takes it for padding"
        )
    return reward


def asked_of_records(names: Iterable[Source], config: RemoteConfig) -> dict[str, Any]:
    """Options of `load_prompts`: columns that rewards and environment ask for, with their asker;
    whether records are kept as they are, for those that take chats; the role of observations that
    are messages; and the tools' schemas.
    """
    singles = [single for several in names for single in cascaded(several)]
    objects = {
        name: name.value if isinstance(name, InMemory) else load_function(str(name))
        for name in singles
        if isinstance(name, InMemory) or is_function(name)
    }
    functions = {
        name: reward for name, reward in objects.items() if isinstance(reward, UserFunction)
    }
    models = [name for name in singles if isinstance(objects.get(name), LoadedModel)]
    models += [
        name
        for name in singles
        if name not in objects and not is_endpoint(name) and name != ENVIRONMENT
    ]
    role, tools = None, []
    columns = {
        column: f"the reward function {name}"
        for name, reward in functions.items()
        for column in reward.columns
    }
    if isinstance(config, EnvironmentConfig) and config.has_turns:
        environments, role = load_environments(config), config.message_role
        tools = load_tools(config.tools) if config.tools else []
        columns |= dict.fromkeys(environments.columns, f"the environment {environments.name}")
    return {
        "columns": dict.fromkeys(config.columns, "--reward_columns") | columns,
        "as_given": bool(models or role)
        or any(reward.in_trls_form for reward in functions.values()),
        "observation_role": role,
        "tools": [tool.schema for tool in tools],
    }


def asked_of_evaluations(config: RewardConfig) -> dict[str, Any]:
    """The same for evaluations. A rival of another vocabulary reads messages by its own chat
    template.
    """
    asked = asked_of_records(config.scorers, config)
    return asked | {"as_given": asked["as_given"] or bool(config.rival)}


# --- sums of rewards ------------------------------------------------------------------------------


class WeightedSum:
    """A sum of rewards by name, each times its weight, not all 0. One of weight 0 is only logged,
    and may be NaN.
    """

    def __init__(self, rewards: Mapping[str, Reward], weights: Sequence[float]):
        self.rewards, self.weights = rewards, weights

    def __call__(self, groups: list[Group]) -> Tensor:
        return self.sum([reward(groups) for reward in self.rewards.values()])

    def sum(self, values: Sequence[Tensor]) -> Tensor:
        """The weighted sum of the rewards' values, [P, K] each."""
        weighted = [
            weight * value.float()
            for weight, value in zip(self.weights, values, strict=True)
            if weight
        ]
        return torch.stack(weighted).sum(0)


def single_rewards(rewards: Mapping[str, Reward]) -> dict[str, Reward]:
    """The rewards, and in place of sums their parts, as `name/part`."""
    singles: dict[str, Reward] = {}
    for name, reward in rewards.items():
        parts = reward.rewards if isinstance(reward, WeightedSum) else {}
        singles |= {f"{name}/{part}": single for part, single in parts.items()} or {name: reward}
    return singles


def rewarded(rewards: Mapping[str, Reward], groups: list[Group]) -> dict[str, Tensor]:
    """Values of rewards by their names, and the parts of sums without their weights, as
    `name/part`. All processes must call it. Raises EndpointError, FunctionError or
    FunctionInterruptedError on each of them if a reward fails on any, once all others are computed:
    a model that is spread over processes needs all of them.
    """
    singles = single_rewards(rewards)
    values: dict[str, Tensor] = {}
    failures: list[EndpointError | FunctionError | FunctionInterruptedError] = []
    taken = {*singles, *(f"{name}_std" for name in singles)}
    for name, single in singles.items():
        try:
            values[name] = single(groups)
            values |= further_tables(name, single, values[name], groups)
            require_new_names(name, single, taken)
        except (EndpointError, FunctionError, FunctionInterruptedError) as error:
            failures.append(error)
    failed = gather_object([type(failure)(str(failure)) for failure in failures])
    if failed:
        raise failed[0] from (failures[0] if failures else None)
    sums = {}
    for name, reward in rewards.items():
        if isinstance(reward, WeightedSum):
            sums[name] = reward.sum([values[f"{name}/{part}"] for part in reward.rewards])
    return sums | values


def further_tables(
    name: str, reward: Reward, values: Tensor, groups: list[Group]
) -> dict[str, Tensor]:
    """What a reward tells beside its values, [P, K] each: the parts of what an environment gives,
    and which responses each part of a cascade, or a judge, has answered.
    """
    tables: dict[str, Tensor] = {}
    if isinstance(reward, EnvironmentReward) and len(reward.weights) > 1:
        tables |= {f"{name}/{part}": table for part, table in reward.parts(groups).items()}
    if isinstance(reward, Cascade):
        tables |= {f"{name}/{part}_answered": table for part, table in reward.answered.items()}
    if isinstance(reward, JudgedPairs):
        tables[f"{name}_answered"] = reward.answered
    if isinstance(reward, ComparisonCascade):
        for part, share in reward.answered_by.items():
            tables[f"{name}/{part}_answered"] = torch.full_like(values, share)
    return tables


def require_new_names(name: str, reward: Reward, taken: set[str]) -> None:
    """Raises FunctionError if a reward function logs a metric under the name of one of the run."""
    prefix = name.partition("/")[0]
    logged = [entry for function in functions_in(reward) for entry in function.logged]
    if clash := taken.intersection(f"{prefix}/{metric}" for metric, _ in logged):
        raise FunctionError(
            f"{name} logs what would be {min(clash)}, a metric of the run: rename it"
        )


# --- checks and logs ------------------------------------------------------------------------------


def require_finite_rewards(
    accelerator: Accelerator, reward: Reward, groups: list[Group], values: Tensor
) -> None:
    """Raises NotFiniteError on every process if a reward of the groups is not finite on any of
    them. It says what a reward model in fp16 does not hold, if one is the reason.
    """
    try:
        require_finite(accelerator, "a reward", values)
    except NotFiniteError as error:
        for name, single in single_rewards({"reward": reward}).items():
            for model in single.rewards.values() if isinstance(single, Cascade) else [single]:
                overflow = model.overflow(groups) if isinstance(model, ModelReward) else None
                if overflow is not None:
                    remedy = f"--precision {wider_precision(trains=False).name} has a wider range"
                    raise NotFiniteError(
                        f"{error}, since in {name} {overflow}: {remedy}"
                    ) from error
        raise


def functions_in(reward: Reward) -> list[UserFunction]:
    if isinstance(reward, AgainstRival):
        reward = reward.reward
    parts: list[object] = (
        [*reward.rewards.values()] if isinstance(reward, Cascade | ComparisonCascade) else [reward]
    )
    return [one for one in parts if isinstance(one, UserFunction)]


def logged_means(rewards: Mapping[str, Reward]) -> dict[str, float]:
    """The values that functions logged with `log_metric` since the last call, as `name/NAME`: means
    over the values of all processes, each of which must call it.
    """
    singles = single_rewards(rewards).items()
    functions = [
        (name, function)
        for name, single in singles
        for function in functions_in(single)
        if function.logs
    ]
    logged = [
        (f"{name.partition('/')[0]}/{metric}", value)
        for name, function in functions
        for metric, value in function.logged
    ]
    values: dict[str, list[float]] = {}
    for metric, value in gather_object(logged) if functions else []:
        values.setdefault(metric, []).append(value)
    for _, function in functions:
        function.logged.clear()
    return {metric: sum(values[metric]) / len(values[metric]) for metric in sorted(values)}


# --- penalties ------------------------------------------------------------------------------------


def penalized_rewards(
    reward: Reward,
    groups: list[Group],
    config: PenaltyConfig,
    longest: int,
    *,
    by_token: bool = False,
) -> dict[str, Tensor]:
    """Returns tables [P, K] by name: `reward` less all penalties, as "reward"; the penalties; and
    the parts of a reward that is a sum. longest: tokens that a response may have. by_token: adds
    TOKEN_REWARDS. Raises as `rewarded` does.
    """
    subtracted = penalties(groups, config, longest)
    values = rewarded({"reward": reward}, groups) | subtracted
    for penalty in subtracted.values():
        values["reward"] = values["reward"] - penalty
    parts = reward if isinstance(reward, WeightedSum) else WeightedSum({"": reward}, [1.0])
    if any(isinstance(single, RelativeReward) for single in parts.rewards.values()):
        scores = [values[f"reward/{name}" if name else "reward"] for name in parts.rewards]
        values[PAIR_REWARDS] = pair_rewards(parts, scores, [*subtracted.values()])
    if by_token:
        table = np.zeros((*values["reward"].shape, longest), dtype=np.float32)
        for single, weight in zip(parts.rewards.values(), parts.weights, strict=True):
            if weight and isinstance(single, EnvironmentReward | FunctionReward):
                for token in single.at_tokens(groups):
                    at_response = table[token.prompt, token.response]
                    np.add.at(at_response, token.places, (weight * token.values).astype(np.float32))
        values[TOKEN_REWARDS] = torch.from_numpy(table)
    return values


def pair_rewards(
    reward: WeightedSum, values: Sequence[Tensor], subtracted: Sequence[Tensor]
) -> Tensor:
    """The rewards' difference in each pair, [P, K, K] fp32, skew-symmetric: D of those that
    compare, and differences of those that score, each times its weight, less differences of
    penalties. values: each reward's of the last call, and subtracted: the penalties, [P, K] each.
    """
    terms = [
        weight
        * (single.compared if isinstance(single, RelativeReward) else differences_of(value.float()))
        for single, weight, value in zip(
            reward.rewards.values(), reward.weights, values, strict=True
        )
        if weight
    ]
    return torch.stack(terms + [-differences_of(penalty.float()) for penalty in subtracted]).sum(0)


def differences_of(values: Tensor) -> Tensor:
    """v_i − v_j, [P, K] -> [P, K, K]."""
    return values[:, :, None] - values[:, None, :]


def penalties(groups: list[Group], config: PenaltyConfig, longest: int) -> dict[str, Tensor]:
    """The penalties that are on, 0 or more, by the names of their metrics. longest: tokens that a
    response may have.
    """
    parts: dict[str, Tensor] = {}
    if config.missing_eos_penalty:
        parts["missing_eos"] = config.missing_eos_penalty * ~finished(groups)
    if config.length_penalty:
        parts["length"] = config.length_penalty * (
            lengths(groups) - config.length_penalty_after
        ).clamp(min=0)
    if config.ngram_penalty:
        shares = [
            [repeated_share(r.ids, config.ngram_length) for r in group.responses]
            for group in groups
        ]
        parts["ngram"] = config.ngram_penalty * torch.tensor(shares)
    if config.overlong_margin:
        with_observations = torch.tensor(
            [[len(r.ids) for r in group.responses] for group in groups]
        ).float()
        parts["overlong"] = -overlong_penalty(
            with_observations, longest=longest, margin=config.overlong_margin
        )
    return {f"penalty/{name}": values for name, values in parts.items()}


def repeated_share(ids: list[int], n: int) -> float:
    """1 − different n-grams / n-grams; 0 if there is none."""
    ngrams = list(zip(*(ids[start:] for start in range(n)), strict=False))
    return 1 - len(set(ngrams)) / len(ngrams) if ngrams else 0.0
