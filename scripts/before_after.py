"""Two models side by side on the same prompts: rewards of sampled and greedy responses, and their words.

python scripts/before_after.py --before runs/sft/model --after runs/p3o/model --prompts eval.jsonl --reward my:function
"""

import json
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING, NamedTuple

from fastp3o.cli import parse
from fastp3o.config import Flags, option, options, required
from fastp3o.named_function import import_function
from fastp3o.script import run_script

if TYPE_CHECKING:  # functions import what takes seconds, which --help does without
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@options
class BeforeAfterConfig(Flags):
    """Samples two models with the same seed, rewards what they say and shows it."""

    before: str = required("A Hugging Face causal LM, as a folder or a hub name.")
    after: str = required("The model that it became.")
    prompts: str = required("JSON Lines file of records with a `prompt`.")
    reward: str = required("A function of prompts and responses, as module:function.")
    responses_per_prompt: int = option(8, "Sampled responses to each prompt.", at_least=2)
    max_response_tokens: int = option(32, "Most tokens of a response.", at_least=1)
    examples: int = option(5, "Prompts of which a sampled response is shown.", at_least=0)
    output: str | None = option(None, "Picture to write: rewards of all samples, before and after.")
    seed: int = option(0, "Seed of the samples.", at_least=0)


class Responses(NamedTuple):
    """examples: the first sampled one to each prompt. rewards: of all that were sampled, and of one greedy response to
    each prompt.
    """

    examples: list[str]
    sampled_rewards: list[float]
    greedy_rewards: list[float]


def main(config: BeforeAfterConfig) -> None:
    prompts = [json.loads(line)["prompt"] for line in Path(config.prompts).read_text(encoding="utf-8").splitlines()]
    both = {name: responses(config, getattr(config, name), prompts) for name in ("before", "after")}
    print(f"{len(prompts)} prompts, rewarded by {config.reward}:")
    for name, one in both.items():
        sampled = f"{fmean(one.sampled_rewards):6.2f} ± {stdev(one.sampled_rewards):.2f}"
        print(f"  {name:<7} sampled {sampled}   greedy {fmean(one.greedy_rewards):6.2f}")
    before, after = both.values()
    for prompt, *texts in list(zip(prompts, before.examples, after.examples, strict=True))[: config.examples]:
        print(f"\n{prompt}")
        for name, text in zip(both, texts, strict=True):
            print(f"  {name:<7} {text}")
    if config.output:
        draw(both, Path(config.output))
        print(f"\npicture: {config.output}")


def responses(config: BeforeAfterConfig, name: str, prompts: list[str]) -> Responses:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(name, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(name).eval()
    reward = import_function(config.reward, "--reward")
    torch.manual_seed(config.seed)
    greedy = generated(model, tokenizer, prompts, config, do_sample=False)
    repeated = [prompt for prompt in prompts for _ in range(config.responses_per_prompt)]
    sampled = generated(model, tokenizer, repeated, config, do_sample=True, top_k=0)
    examples = sampled[:: config.responses_per_prompt]
    return Responses(examples, reward(repeated, sampled), reward(prompts, greedy))


def generated(
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    prompts: list[str],
    config: BeforeAfterConfig,
    **settings: object,
) -> list[str]:
    batch = tokenizer(prompts, return_tensors="pt", padding=True, return_token_type_ids=False)
    ids = model.generate(**batch, max_new_tokens=config.max_response_tokens, **settings)
    return tokenizer.batch_decode(ids[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)


def draw(both: dict[str, Responses], path: Path) -> None:
    """Histograms of the rewards of all samples, and the first example in words."""
    from matplotlib.figure import Figure

    page = Figure(figsize=(8, 3.4), layout="constrained")
    axes = page.subplots()
    rewards = [one.sampled_rewards for one in both.values()]
    bins = axes.hist(
        rewards, bins=24, color=["#B8B8B8", "#0072B2"], label=list(both), histtype="stepfilled", alpha=0.75
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
