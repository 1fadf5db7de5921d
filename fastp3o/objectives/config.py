"""What the configurations of all online objectives have in common."""

from dataclasses import dataclass
from typing import ClassVar

from fastp3o.config import EVALUATION_FLAGS, SamplerConfig, StageConfig, TrainableConfig, option, required
from fastp3o.objectives.base import Objective
from fastp3o.rewards.config import PenaltyConfig, RewardConfig


@dataclass(frozen=True, kw_only=True)
class OnlineConfig(RewardConfig, PenaltyConfig, SamplerConfig, TrainableConfig, StageConfig):
    """Rollouts, rewards, evaluations: all but the objective's own settings."""

    CHANGEABLE: ClassVar[tuple[str, ...]] = (
        *("updates", "offload", "eval_batch_size", "eval_at", "samples_every", "ptx_coef"),
    )

    prompts: str = required("Training prompts: a hub name (or name:config), or JSONL or parquet files.")
    eval_prompts: str | None = option(None, "Prompts of the evaluation; a fixed set gives comparable frontiers.")
    reference: str | None = option(
        None, "The KL's reference policy; the starting model if not given, which with LoRA takes no memory of its own."
    )
    reference_every: int = option(
        0, "The policy's own weights become the reference after every this many updates; 0: it stays."
    )
    reference_decay: float = option(
        0.0,
        "The reference becomes decay * reference + (1 - decay) * policy after each update, an exponential mean; 0: it "
        "stays.",
    )
    offload: bool = option(False, "Keep reference and reward model on the CPU between uses.")

    learning_rate: float = option(
        1e-6, "Peak learning rate of AdamW (first author: 1e-6 at 1 B, 8e-6 at 125 M).", above=0, changeable=True
    )
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

    ptx_data: str | None = option(
        None,
        "Texts of a pretraining mix, in the layouts of demonstrations: a hub name, or JSONL or parquet files. All of "
        "--split are used, whatever --limit; --max_prompt_tokens and --max_response_tokens cut them.",
    )
    ptx_coef: float = option(1.0, "Weight of the mix's loss, in nats per token, beside the objective's.")
    ptx_batch_size: int = option(8, "Texts of the mix in each optimizer step, over all processes.")

    max_response_tokens: int = option(128, "Longest response, in tokens (first author: 128).")
    mask_truncated: bool = option(
        False, "Responses without an end-of-sequence take no part in the loss; they stay in others' baselines."
    )
    dynamic_sampling: int = option(
        0, "Sample the responses of a prompt again while all their rewards are equal, at most so often; 0 never."
    )

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
        self.check_at_least(1, "ptx_batch_size")
        self.check_at_least(0, "samples_every", "reference_every", "dynamic_sampling")
        self.check(self.ptx_coef > 0, "ptx_coef", "above 0")
        self.check_alone("ptx_data", "ptx_coef", "ptx_batch_size")
        self.check_reference()
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

    def check_reference(self) -> None:
        self.check(0 <= self.reference_decay < 1, "reference_decay", "at least 0 and below 1")
        if self.reference_every and self.reference_decay:
            raise ValueError("--reference_every and --reference_decay exclude each other")
        if self.reference_moves and self.lora_rank:
            raise ValueError(
                "--reference_every and --reference_decay need whole weights that train: without --lora_rank"
            )

    @property
    def from_mixture(self) -> int:
        """How many of a prompt's responses a mixture of policy and reference samples: the last ones."""
        return 0

    @property
    def reference_moves(self) -> bool:
        return bool(self.reference_every or self.reference_decay)

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

    def build(self) -> Objective:
        """What this configuration trains with; each objective's own says which, under its name in `objective`."""
        raise NotImplementedError(f"{type(self).__name__} is not the configuration of an objective")
