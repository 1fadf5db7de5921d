"""Loads the rewards that a configuration names, and tries them before anything is written."""

from functools import partial

from datasets import Dataset

from fastp3o.config import PolicyConfig
from fastp3o.errors import UserError
from fastp3o.models.frozen import load_held
from fastp3o.models.loading import load_reward_model
from fastp3o.rewards.cascade import Cascade
from fastp3o.rewards.config import RemoteConfig, RewardConfig, cascaded, short_names
from fastp3o.rewards.environment import EnvironmentReward
from fastp3o.rewards.function import FunctionReward
from fastp3o.rewards.model import ModelReward
from fastp3o.rewards.remote import RemoteReward
from fastp3o.rewards.reward import Reward, WeightedSum, load_reward
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
) -> dict[str, Reward]:
    """`reward`, and `gold`, which evaluations have, where the configuration names them. policy, continues: as of
    `load_named_reward`.
    """
    load = partial(load_named_reward, context, config, policy, continues=continues)
    rewards: dict[str, Reward] = {}
    if config.rewards:
        loaded = [load(name, prompts) for name in config.rewards]
        named = dict(zip(short_names(config.rewards), loaded, strict=True))
        rewards["reward"] = loaded[0] if config.weights == [1.0] else WeightedSum(named, config.weights)
    if config.gold_reward and eval_prompts is not None:
        rewards["gold"] = load(config.gold_reward, eval_prompts)
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
) -> Reward:
    """Loads the reward of this name. An endpoint, and a function unless a run continues, is tried on the first example
    before anything is written.

    remote: requests to endpoints, and the time limit of functions. policy: how the prompts of responses are read, how
    these end, and how models are loaded. passes: whether it may leave responses to the next one of a cascade.
    """
    # `A else B`: each part but the last may leave responses to the next one.
    parts, reading = cascaded(name), policy.reading
    if len(parts) > 1:
        load = partial(load_named_reward, context, remote, policy, continues=continues)
        rewards = [load(part, examples, passes=part is not parts[-1]) for part in parts]
        return Cascade(dict(zip(short_names(parts), rewards, strict=True)))
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
    elif passes:
        raise UserError(f"the reward {name} answers for every response: `else` after it has no effect")
    # Tried before the run writes anything: a misspelt column or a server that is down ends it at once.
    if isinstance(reward, RemoteReward) or (isinstance(reward, FunctionReward) and not continues):
        on_main_process(context.accelerator, partial(reward.check, *make_prompts(examples[:1])))
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
