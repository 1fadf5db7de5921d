"""Loads the rewards that a configuration names, and tries them before anything is written."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path

from datasets import Dataset

from fastp3o.config import PolicyConfig, RunConfig
from fastp3o.errors import UserError
from fastp3o.models.frozen import load_held
from fastp3o.models.loading import load_policy, load_reward_model
from fastp3o.models.sharding import loading_device
from fastp3o.models.tokenizer import load_tokenizer
from fastp3o.rewards.cascade import Cascade
from fastp3o.rewards.comparisons import ComparisonCascade, JudgedPairs, RelativeReward
from fastp3o.rewards.config import (
    VERDICTS,
    Compared,
    LanguageJudgeConfig,
    RemoteConfig,
    RewardConfig,
    cascaded,
    is_judge,
    short_names,
)
from fastp3o.rewards.environment import EnvironmentReward
from fastp3o.rewards.function import FunctionReward, UserFunction
from fastp3o.rewards.judge import ChatEndpoint, EndpointJudge, read_template
from fastp3o.rewards.judged import ONE_LETTER, EndpointComparisons, LocalComparisons
from fastp3o.rewards.model import ModelReward, PreferenceModelReward
from fastp3o.rewards.remote import RemoteReward
from fastp3o.rewards.reward import Reward, WeightedSum, load_reward, single_rewards
from fastp3o.rewards.verdicts import VerdictFile
from fastp3o.rollouts.groups import make_prompts
from fastp3o.runtime.context import Context
from fastp3o.runtime.processes import on_main_process
from fastp3o.sources import Source

# Options of reading prompts that a reward model of another vocabulary has in common with the
# policy.
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
    """`reward`, and `gold`, which evaluations have, where the configuration names them.
    comparisons: the pairs that are judged by rewards which compare responses. The others are as of
    `load_named_reward`. Raises UserError if a choice of pairs has no effect.
    """
    load = partial(
        load_named_reward,
        context,
        config,
        policy,
        continues=continues,
        responses_per_prompt=responses_per_prompt,
    )
    rewards: dict[str, Reward] = {}
    if config.rewards:
        loaded = [load(name, prompts) for name in config.rewards]
        named = dict(zip(short_names(config.rewards), loaded, strict=True))
        rewards["reward"] = (
            loaded[0] if config.weights == [1.0] else WeightedSum(named, config.weights)
        )
    if config.gold_reward and eval_prompts is not None:
        rewards["gold"] = load(config.gold_reward, eval_prompts)
    choose_judged_pairs(rewards, comparisons)
    return rewards


def choose_judged_pairs(rewards: Mapping[str, Reward], comparisons: Compared) -> None:
    """Tells the rewards that judge pair by pair which pairs to judge. Raises UserError for another
    choice than "all" if no part of `reward` does.
    """
    require_judged_pairs(rewards.get("reward"), comparisons)
    for single in single_rewards(rewards).values():
        if isinstance(single, JudgedPairs):
            single.judged = comparisons


def require_judged_pairs(reward: Reward | None, comparisons: Compared) -> None:
    """Raises UserError if a choice of pairs has no effect: no part of the reward asks about one
    pair at a time.
    """
    parts = [] if reward is None else [*single_rewards({"reward": reward}).values()]
    if comparisons == "all" or any(isinstance(part, JudgedPairs) for part in parts):
        return
    if any(isinstance(part, RelativeReward) for part in parts):
        why = "a preference model makes all comparisons from one pass over each response, which is linear already"
    else:
        why = "--reward scores each response alone"
    raise UserError(
        f"--comparisons {comparisons} has no effect without a reward that judges pair by pair (a function of firsts "
        f"and seconds, or judge): {why}. Leave out --comparisons"
    )


def load_named_reward(
    context: Context,
    remote: RemoteConfig,
    policy: PolicyConfig,
    name: Source,
    examples: Dataset,
    *,
    continues: bool = False,
    passes: bool = False,
    responses_per_prompt: int = 2,
) -> Reward:
    """Loads the reward of this name. An endpoint, and a function unless a run continues, is tried
    on the first example before anything is written.

    remote: requests to endpoints, and the time limit of functions. policy: how the prompts of
    responses are read, how these end, and how models are loaded. passes: whether it may leave
    responses to the next one of a cascade. responses_per_prompt: that a function is tried on.
    """
    # `A else B`: each part but the last may leave responses to the next one.
    parts = cascaded(name)
    if len(parts) > 1:
        load = partial(
            load_named_reward,
            context,
            remote,
            policy,
            continues=continues,
            responses_per_prompt=responses_per_prompt,
        )
        return cascade(
            [*map(str, parts)],
            [load(part, examples, passes=part is not parts[-1]) for part in parts],
        )
    reward = (
        load_judge(context, remote, policy)
        if is_judge(name)
        else load_one(context, remote, policy, name)
    )
    if isinstance(reward, RemoteReward | FunctionReward | EnvironmentReward):
        reward.passes = passes
    elif passes and not isinstance(reward, JudgedPairs):
        raise UserError(
            f"the reward {name} answers for every response: `else` after it has no effect"
        )
    # Tried before the run writes anything: a misspelt column or a server that is down ends it at
    # once.
    (first,) = make_prompts(examples[:1])
    if isinstance(reward, RemoteReward):
        on_main_process(context.accelerator, partial(reward.check, first))
    if isinstance(reward, UserFunction | EndpointComparisons) and not continues:
        on_main_process(context.accelerator, partial(reward.check, first, responses_per_prompt))
    say_what_is_odd(context, policy, name, reward)
    return reward


def load_one(context: Context, remote: RemoteConfig, policy: PolicyConfig, name: Source) -> Reward:
    """A reward by its name alone, with the run's settings."""
    reading = policy.reading
    return load_reward(
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


def say_what_is_odd(context: Context, policy: PolicyConfig, name: Source, reward: Reward) -> None:
    """Prints what is special about a reward, and checks that the model of one can read the longest
    sequences.
    """
    if isinstance(reward, RelativeReward):
        which = (
            ", all of them for one pass a response,"
            if isinstance(reward, PreferenceModelReward)
            else ""
        )
        context.accelerator.print(
            f"the reward {name} compares the responses to a prompt{which} and scores none alone"
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


# --- a language model that judges -----------------------------------------------------------------


def load_judge(context: Context, config: RemoteConfig, policy: PolicyConfig) -> JudgedPairs:
    """The language model that judges for `--reward judge`: at an endpoint, whose verdicts each
    process keeps in a file of its own, or on this machine. Raises UserError for a command that
    compares nothing.
    """
    if not isinstance(config, LanguageJudgeConfig) or config.judge_model is None:
        raise UserError(
            "--reward judge compares responses, and nothing is compared here: `fastp3o win_rate` does"
        )
    files = config.judge_template, config.judge_principles
    if config.judge_url:
        template = read_template(*files)
        file = verdict_file(config, policy, context.accelerator.process_index)
        endpoint = ChatEndpoint(
            config.judge_url,
            config.judge_model,
            timeout=config.judge_timeout,
            retries=config.judge_retries,
        )
        return EndpointComparisons(
            EndpointJudge(
                endpoint,
                file=file,
                requests=config.judge_requests,
                template=template,
                logprobs=True,
            )
        )
    model = load_held(
        context,
        load_policy,
        config.judge_model,
        device=loading_device(context.device, context.mesh),
        dtype=context.precision.weights,
        trust_remote_code=policy.trust_remote_code,
    )
    return LocalComparisons(
        model,
        load_tokenizer(config.judge_model, trust_remote_code=policy.trust_remote_code),
        read_template(*files, pattern=ONE_LETTER),
        device=context.device,
        mesh=context.mesh,
        packing=policy.packing,
        offload=policy.offload,
    )


def verdict_file(config: LanguageJudgeConfig, policy: PolicyConfig, process: int) -> VerdictFile:
    """The file of a process's verdicts, --verdicts or one in the run's folder, which knows those of
    all processes.
    """
    run = policy if isinstance(policy, RunConfig) else None
    if config.verdicts:
        first = Path(config.verdicts)
    elif run is not None:
        first = Path(run.output_dir, VERDICTS)
    else:
        return VerdictFile(None)
    own = first.with_stem(f"{first.stem}-{process}") if process else first
    if not config.verdicts and run is not None and run.overwrite:  # what is there will be removed
        file = VerdictFile(None)
        file.path = own
        return file
    all_files = [first, *sorted(first.parent.glob(f"{first.stem}-*{first.suffix}"))]
    return VerdictFile(own, [path for path in all_files if path != own])


def cascade(names: list[str], rewards: list[Reward]) -> Reward:
    """Rewards that stand in for one another. Raises UserError if some of them compare responses and
    others score.
    """
    by_name = dict(zip(short_names(names), rewards, strict=True))
    comparing = {
        name: reward for name, reward in by_name.items() if isinstance(reward, RelativeReward)
    }
    if not comparing:
        return Cascade(by_name)
    if len(comparing) < len(by_name):
        others = ", ".join(name for name in by_name if name not in comparing)
        raise UserError(
            f"{', '.join(comparing)} of `{' else '.join(names)}` compares responses, and {others} scores them: the "
            "rewards of a cascade must all do the same"
        )
    return ComparisonCascade(comparing)
