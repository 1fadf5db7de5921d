"""What the configurations of all online objectives have in common."""

from dataclasses import dataclass
from typing import ClassVar

from fastp3o.config import EVALUATION_FLAGS, SamplerConfig, StageConfig, TrainableConfig, option, required
from fastp3o.objectives.base import Objective
from fastp3o.rewards.config import PenaltyConfig, RewardConfig


@dataclass(frozen=True, kw_only=True)
class OnlineConfig(RewardConfig, PenaltyConfig, SamplerConfig, TrainableConfig, StageConfig):
    """Rollouts, rewards, evaluations: all but the objective's own settings."""

    CHANGEABLE: ClassVar[tuple[str, ...]] = (*("updates", "offload", "eval_batch_size", "eval_at", "samples_every"),)

    prompts: str = required("Training prompts: a hub name (or name:config), or JSONL or parquet files.")
    eval_prompts: str | None = option(None, "Prompts of the evaluation; a fixed set gives comparable frontiers.")
    reference: str | None = option(
        None, "The KL's reference policy; the starting model if not given, which with LoRA takes no memory of its own."
    )
    offload: bool = option(False, "Keep reference and reward model on the CPU between uses.")

    learning_rate: float = option(1e-6, "Peak learning rate of AdamW (first author: 1e-6 at 1 B, 8e-6 at 125 M).")
    updates: int = option(500, "Rounds of rollouts and inner epochs.")
    prompts_per_update: int = option(
        64, "Prompts of a round, over all processes; two responses to each are a pair (first author: 64)."
    )
    prompts_per_minibatch: int = option(
        4, "Prompts of one optimizer step, over all processes (first author: 4 at 1 B)."
    )
    responses_per_prompt: int = option(
        2, "K: responses to each prompt. The paper's algorithm has 2; more give all K (K − 1) / 2 pairs, averaged."
    )
    inner_epochs: int = option(4, "Passes over each round's rollouts (first author: 4).")

    max_response_tokens: int = option(128, "Longest response, in tokens (first author: 128).")

    eval_batch_size: int = option(64, "Prompts evaluated at once on one device.")
    eval_responses_per_prompt: int = option(1, "Responses to each prompt in an evaluation.")
    eval_at: str = option(
        "", "Evaluate after these updates too, separated by commas; early ones show where a frontier bends."
    )
    samples_every: int = option(20, "Print a table of sample responses every this many updates; 0 never.")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_trainable()
        self.check_sampler()
        self.check_rewards()
        positive = ("updates", "prompts_per_update", "prompts_per_minibatch", "inner_epochs", "max_response_tokens")
        self.check_at_least(1, *positive, "eval_batch_size", "eval_responses_per_prompt")
        self.check_at_least(2, "responses_per_prompt")
        self.check_at_least(0, "samples_every")
        self.check_penalties(self.max_response_tokens)
        numbers = all(part.strip().isdecimal() for part in self.eval_at.split(",") if self.eval_at)
        self.check(numbers, "eval_at", "whole numbers separated by commas")
        self.check(
            max(self.evaluated_at, default=0) <= self.updates, "eval_at", f"updates of the run, at most {self.updates}"
        )
        self.check_alone("eval_prompts", *EVALUATION_FLAGS, "eval_at", "gold_reward", "eval_responses_per_prompt")
        if self.prompts_per_update % self.prompts_per_minibatch:
            raise ValueError(
                f"--prompts_per_update ({self.prompts_per_update}) must be a multiple of "
                f"--prompts_per_minibatch ({self.prompts_per_minibatch}), so that steps average over equally many"
            )

    @property
    def minibatches_per_update(self) -> int:
        return self.prompts_per_update // self.prompts_per_minibatch

    @property
    def longest_sequence(self) -> int:
        """Tokens of a prompt and a response at most."""
        return self.max_prompt_tokens + self.max_response_tokens

    def evaluates_after(self, step: int, *, last: int) -> bool:
        return step in self.evaluated_at or super().evaluates_after(step, last=last)

    @property
    def evaluated_at(self) -> set[int]:
        return {int(part) for part in self.eval_at.split(",")} if self.eval_at else set()

    def objective(self) -> Objective:
        """What this configuration trains with; each objective's own configuration says which."""
        raise NotImplementedError(f"{type(self).__name__} is not the configuration of an objective")
