"""Loads the rewards that a configuration names, and tries them before anything is written."""

from functools import partial

from datasets import Dataset

from fastp3o.config import PolicyConfig
from fastp3o.errors import UserError
from fastp3o.models.frozen import load_held
from fastp3o.models.loading import load_reward_model
from fastp3o.rewards.cascade import Cascade
from fastp3o.rewards.comparisons import ComparisonCascade, JudgedPairs, RelativeReward
from fastp3o.rewards.config import Compared, RemoteConfig, RewardConfig, cascaded, short_names
from fastp3o.rewards.environment import EnvironmentReward
from fastp3o.rewards.function import FunctionReward, UserFunction
from fastp3o.rewards.model import ModelReward
from fastp3o.rewards.remote import RemoteReward
from fastp3o.rewards.reward import Reward, WeightedSum, load_reward, single_rewards
from fastp3o.rollouts.groups import make_prompts
from fastp3o.runtime.context import Context
from fastp3o.runtime.processes import on_main_process

# Options of reading prompts that a reward model of another vocabulary has in common with the policy.
READ_ANEW = ("max_prompt_tokens", "max_characters", "chat_template_kwargs")


def load_rewards(
    context: Context,
    config: RewardConfig,
    policy: PolicyConfig,
    prompts: Dataset,
    eval_prompts: Dataset | None,
    *,
    continues: bool,
    comparisons: Compared = "all",
    responses_per_prompt: int = 2,
) -> dict[str, Reward]:
    """`reward`, and `gold`, which evaluations have, where the configuration names them. comparisons: the pairs that are
    judged by rewards which compare responses. The others are as of `load_named_reward`.
    """
    load = partial(
        load_named_reward, context, config, policy, continues=continues, responses_per_prompt=responses_per_prompt
    )
    rewards: dict[str, Reward] = {}
    if config.rewards:
        loaded = [load(name, prompts) for name in config.rewards]
        named = dict(zip(short_names(config.rewards), loaded, strict=True))
        rewards["reward"] = loaded[0] if config.weights == [1.0] else WeightedSum(named, config.weights)
    if config.gold_reward and eval_prompts is not None:
        rewards["gold"] = load(config.gold_reward, eval_prompts)
    for single in single_rewards(rewards).values():
        if isinstance(single, JudgedPairs | ComparisonCascade):
            single.judged = comparisons
    return rewards


def load_named_reward(
    context: Context,
    remote: RemoteConfig,
    policy: PolicyConfig,
    name: str,
    examples: Dataset,
    *,
    continues: bool = False,
    passes: bool = False,
    responses_per_prompt: int = 2,
) -> Reward:
    """Loads the reward of this name. An endpoint, and a function unless a run continues, is tried on the first example
    before anything is written.

    remote: requests to endpoints, and the time limit of functions. policy: how the prompts of responses are read, how
    these end, and how models are loaded. passes: whether it may leave responses to the next one of a cascade.
    responses_per_prompt: that a function is tried on.
    """
    # `A else B`: each part but the last may leave responses to the next one.
    parts, reading = cascaded(name), policy.reading
    if len(parts) > 1:
        load = partial(
            load_named_reward, context, remote, policy, continues=continues, responses_per_prompt=responses_per_prompt
        )
        return cascade(parts, [load(part, examples, passes=part is not parts[-1]) for part in parts])
    reward = load_reward(
        name,
        context.tokenizer,
        device=context.device,
        dtype=context.precision.weights,
        load=partial(load_held, context, load_reward_model),
        packing=policy.packing,
        mesh=context.mesh,
        offload=policy.offload,
        trust_remote_code=policy.trust_remote_code,
        remote=remote,
        reading={name: reading[name] for name in READ_ANEW} | {"clock": context.clock},
    )
    if isinstance(reward, RemoteReward | FunctionReward | EnvironmentReward):
        reward.passes = passes
    elif passes and not isinstance(reward, JudgedPairs):
        raise UserError(f"the reward {name} answers for every response: `else` after it has no effect")
    # Tried before the run writes anything: a misspelt column or a server that is down ends it at once.
    (first,) = make_prompts(examples[:1])
    if isinstance(reward, RemoteReward):
        on_main_process(context.accelerator, partial(reward.check, first))
    if isinstance(reward, UserFunction) and not continues:
        on_main_process(context.accelerator, partial(reward.check, first, responses_per_prompt))
    if isinstance(reward, RelativeReward):
        context.accelerator.print(
            f"the reward {name} compares the responses to a prompt, and scores none of them alone"
        )
    if isinstance(reward, ModelReward) and reward.has_other_template:
        context.accelerator.print(
            f"the reward model {name} has the policy's vocabulary and another chat template: it scores messages as the "
            "policy's template writes them"
        )
    # In another vocabulary, lengths are unknown until there are texts.
    if isinstance(reward, ModelReward) and reward.shares_vocabulary:
        # One that was stopped by a text gets an end.
        reward.model.model.check_reach(policy.longest_sequence + bool(policy.stops))
    return reward


def cascade(names: list[str], rewards: list[Reward]) -> Reward:
    """Rewards that stand in for one another. Raises UserError if some of them compare responses and others score."""
    by_name = dict(zip(short_names(names), rewards, strict=True))
    comparing = {name: reward for name, reward in by_name.items() if isinstance(reward, RelativeReward)}
    if not comparing:
        return Cascade(by_name)
    if len(comparing) < len(by_name):
        others = ", ".join(name for name in by_name if name not in comparing)
        raise UserError(
            f"{', '.join(comparing)} of `{' else '.join(names)}` compares responses, and {others} scores them: the "
            "rewards of a cascade must all do the same"
        )
    return ComparisonCascade(comparing)
