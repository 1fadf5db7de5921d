"""Two models side by side on the same prompts: rewards of sampled and greedy responses, and their
words.

python scripts/before_after.py --before runs/sft/model --after runs/p3o/model --prompts eval.jsonl --reward my:function
"""

from functools import partial
from pathlib import Path
from statistics import fmean, stdev
from typing import NamedTuple

from fastp3o.cli import parse
from fastp3o.config import Flags, option, required
from fastp3o.script import run_script


class BeforeAfterConfig(Flags):
    """Samples two models with the same seed, rewards what they say and shows it."""

    before: str = required(
        "Model before training: a Hugging Face causal LM, as a folder or a hub name."
    )
    after: str = required("Model after training, in the same form.")
    prompts: str = required("Prompts in any layout: a hub name, or JSONL or parquet files.")
    max_prompt_tokens: int = option(
        512, "Maximum length of a prompt, in tokens; longer ones lose their beginning.", at_least=1
    )
    reward: str = required("Reward: a function of prompts and responses, as module:function.")
    responses_per_prompt: int = option(8, "Sampled responses to each prompt.", at_least=2)
    max_response_tokens: int = option(32, "Maximum length of a response, in tokens.", at_least=1)
    batch_size: int = option(64, "Prompts sampled at once.", at_least=1)
    examples: int = option(
        5, "Number of prompts of which a sampled response is shown; 0 shows none.", at_least=0
    )
    output: str | None = option(
        None, "Picture to write: rewards of all samples, before and after. Default: none."
    )
    seed: int = option(0, "Seed of the samples.", at_least=0)


class Responses(NamedTuple):
    """prompts: as the model reads them. examples: the first sampled response to each. rewards: of
    all that were sampled, and of one greedy response to each prompt.
    """

    prompts: list[str]
    examples: list[str]
    sampled_rewards: list[float]
    greedy_rewards: list[float]


def main(config: BeforeAfterConfig) -> None:
    both = {name: responses(config, getattr(config, name)) for name in ("before", "after")}
    before, after = both.values()
    print(f"{len(before.prompts)} prompts, rewarded by {config.reward}:")
    for name, one in both.items():
        sampled = f"{fmean(one.sampled_rewards):6.2f} ± {stdev(one.sampled_rewards):.2f}"
        print(f"  {name:<7} sampled {sampled}   greedy {fmean(one.greedy_rewards):6.2f}")
    for prompt, *texts in list(zip(before.prompts, before.examples, after.examples, strict=True))[
        : config.examples
    ]:
        print(f"\n{prompt}")
        for name, text in zip(both, texts, strict=True):
            print(f"  {name:<7} {text}")
    if config.output:
        draw(both, Path(config.output))
        print(f"\npicture: {config.output}")


def responses(config: BeforeAfterConfig, name: str) -> Responses:
    from transformers.utils.logging import disable_progress_bar

    from fastp3o.data.loading import load_prompts
    from fastp3o.models.loading import load_policy
    from fastp3o.models.tokenizer import load_tokenizer
    from fastp3o.rewards.function import FunctionReward
    from fastp3o.rollouts.groups import SamplingSettings, make_prompts
    from fastp3o.rollouts.transformers_sampler import TransformersSampler

    disable_progress_bar()
    reward = FunctionReward(config.reward)
    tokenizer, policy = load_tokenizer(name), load_policy(name)
    columns = dict.fromkeys(reward.columns, f"the reward {config.reward}")
    records, _ = load_prompts(
        config.prompts,
        tokenizer,
        max_prompt_tokens=config.max_prompt_tokens,
        columns=columns,
        as_given=reward.in_trls_form,
    )
    prompts = make_prompts(records[:])
    sampler = partial(
        TransformersSampler,
        policy,
        tokenizer,
        max_response_tokens=config.max_response_tokens,
        batch_size=config.batch_size,
    )
    sampled = sampler()(prompts, config.responses_per_prompt, config.seed)
    # Among one token, sampling has no choice.
    greedy = sampler(settings=SamplingSettings(top_k=1))(prompts, 1, 0)
    return Responses(
        [prompt.text for prompt in prompts],
        [group.responses[0].text for group in sampled],
        reward(sampled).flatten().tolist(),
        reward(greedy).flatten().tolist(),
    )


def draw(both: dict[str, Responses], path: Path) -> None:
    """Histograms of the rewards of all samples, and the first example in words."""
    from matplotlib.figure import Figure

    page = Figure(figsize=(8, 3.4), layout="constrained")
    axes = page.subplots()
    rewards = [one.sampled_rewards for one in both.values()]
    bins = axes.hist(
        rewards,
        bins=24,
        color=["#B8B8B8", "#0072B2"],
        label=list(both),
        histtype="stepfilled",
        alpha=0.75,
    )[1]
    for one, color in zip(both.values(), ("#6E6E6E", "#0072B2"), strict=True):
        axes.axvline(fmean(one.sampled_rewards), color=color, linewidth=1.5)
    axes.set(xlabel="reward of a sampled response", ylabel="responses", xlim=(bins[0], bins[-1]))
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    words = "\n".join(f"{name}: {one.examples[0]}" for name, one in both.items())
    page.suptitle(words, fontsize=9, x=0.02, ha="left")
    path.parent.mkdir(parents=True, exist_ok=True)
    page.savefig(path, dpi=150)


if __name__ == "__main__":
    run_script(lambda: main(parse(BeforeAfterConfig)))
