"""The options of win rates, and of rewards without training."""

from collections.abc import Sequence
from typing import Any, ClassVar

from fastp3o.config import LARGEST_INT, EnvironmentConfig, PolicyConfig, Rule, option, required
from fastp3o.errors import UserError
from fastp3o.rewards.config import (
    ENVIRONMENT_RULES,
    LanguageJudgeConfig,
    RemoteConfig,
    reward_names,
)
from fastp3o.sources import Source

JUDGED = "keep=judged"


class SamplingConfig(RemoteConfig, EnvironmentConfig, PolicyConfig):
    """The prompts that are responded to, and how their responses are rewarded."""

    section = "data"
    rules: ClassVar[tuple[Rule, ...]] = ENVIRONMENT_RULES

    prompts: str = required(
        "Prompts to respond to: a hub name (or name:config), or JSONL or parquet files; several are comma-separated.",
        python=list,
    )
    prefix: str | None = option(
        None,
        "File of text put before each sampled prompt (URIAL, arXiv 2312.01552). Rewards and saved data do not "
        "contain it. Default: none.",
    )
    offload: bool = option(
        False, "Keep reward models on the CPU between uses, to save GPU memory.", changeable=True
    )

    @property
    def reading(self) -> dict[str, Any]:
        return super().reading | {"split": self.split, "limit": self.limit}


class JudgeConfig(LanguageJudgeConfig):
    """A judge of two responses: a function, or a language model at an endpoint."""

    judge: str | None = option(
        None,
        "Judge of two responses: a function, as module:function (see FunctionJudge in evaluation/judge.py).",
        needs=JUDGED,
        changeable=True,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.judge and self.judge_url:
            raise UserError("--judge and --judge_url cannot be combined")


class WinRateConfig(JudgeConfig, SamplingConfig):
    """Win rates of checkpoints against each other, by a reward, by a judge, or by both."""

    models: str | Sequence[str] = required(
        "Checkpoints to compare, all pairs of them: causal LMs (hub names or folders), comma-separated.",
        python=list,
    )
    reward: str | None = option(
        None,
        "Reward that decides who wins, the higher one: a reward model (folder or hub name), module:function, a URL, "
        "or environment.",
    )
    output: str | None = option(None, "JSON file to write the result to. Default: only printed.")
    responses_per_prompt: int = option(
        1,
        "Responses to each prompt from each checkpoint; k of one are compared with k of the other.",
        at_least=1,
    )
    seed: int = option(0, "Seed of all checkpoints' responses.", at_least=0, below=LARGEST_INT)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (self.reward or self.judge or self.judge_url):
            raise UserError(
                "nothing says who wins: give --reward, --judge, or --judge_url with --judge_model"
            )
        different = {name for name in self.checkpoints if name}
        if self.models and not 2 <= len(self.checkpoints) == len(different):
            raise UserError(
                f"--models must be two or more different checkpoints, comma-separated, got {self.models!r}"
            )

    @property
    def checkpoints(self) -> list[str]:
        return [name.strip() for name in str(self.models).split(",")]

    @property
    def scorers(self) -> list[Source]:
        return [self.reward] if self.reward else []


class EvaluateConfig(SamplingConfig):
    """Rewards of a model's samples, without training."""

    model: str = required(
        "Model to sample from: a Hugging Face causal LM, as a hub name or a folder."
    )
    reward: str = required(
        "Rewards, comma-separated: reward models (folders or hub names), functions (module:function), URLs, or "
        "environment.",
        python=list,
    )
    responses_per_prompt: int = option(1, "Responses to each prompt.", at_least=1)
    greedy: bool = option(
        False, "Decode greedily, taking the most likely token each time, instead of sampling."
    )
    output: str | None = option(None, "JSON file to write the means to. Default: only printed.")
    seed: int = option(0, "Seed of the samples.", at_least=0, below=LARGEST_INT)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.greedy and self.truncates:
            raise UserError(
                "--greedy takes the most likely token: leave out --top_k, --top_p and --min_p"
            )
        if self.greedy and self.responses_per_prompt > 1:
            raise UserError(
                "--greedy gives one response to each prompt: leave out --responses_per_prompt"
            )

    @property
    def scorers(self) -> list[Source]:
        return reward_names(self.reward)
