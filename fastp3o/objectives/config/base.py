"""Flags that online objectives share."""

from collections.abc import Sequence
from importlib import import_module
from math import gcd
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from fastp3o.config import (
    EnvironmentConfig,
    Flags,
    ObjectiveConfig,
    PolicyConfig,
    Rule,
    StageConfig,
    option,
    required,
)
from fastp3o.errors import UserError
from fastp3o.rewards.config import (
    ENVIRONMENT_RULES,
    ComparisonConfig,
    LanguageJudgeConfig,
    PenaltyConfig,
    RewardConfig,
)
from fastp3o.sources import InMemory

if TYPE_CHECKING:
    from fastp3o.objectives.base import Objective


FIRST_RATE, KL_PER_UPDATE = 1e-6, 0.3  # where no rate is named
# One step a round; with 64 P3O's first author has 1e-6, and what a round moves goes with the root
# of its steps.
ONE_STEP_RATE = 8e-6


# --- options of all online objectives -------------------------------------------------------------


RULES = (
    Rule(
        ("length_penalty_after",),
        lambda config: config.length_penalty_after >= config.max_response_tokens,
        "--length_penalty_after must be below --max_response_tokens ({max_response_tokens}), got "
        "{length_penalty_after}",
    ),
    Rule(
        ("overlong_margin",),
        lambda config: config.overlong_margin > config.max_response_tokens,
        "--overlong_margin must be at most --max_response_tokens ({max_response_tokens}), got {overlong_margin}",
    ),
    Rule(
        ("environment",),
        lambda config: config.has_turns and config.from_mixture,
        "--mixture cannot be combined with --environment or --tools: a mixture samples responses of one turn",
    ),
    Rule(
        ("interrupt_rollouts",),
        lambda config: config.interrupt_rollouts and config.sampler != "vllm",
        "--interrupt_rollouts has no effect without --sampler vllm",
    ),
    Rule(
        ("reference_every", "reference_decay"),
        lambda config: config.reference_every and config.reference_decay,
        "--reference_every and --reference_decay cannot be combined",
    ),
    Rule(
        ("lora_rank",),
        lambda config: config.lora_rank and config.reference_moves,
        "--reference_every and --reference_decay need whole weights that train: no --lora_rank",
    ),
    Rule(
        ("comparisons", "lora_rank"),
        lambda config: config.comparisons == "anchor" and config.lora_rank and not config.reference,
        "--comparisons anchor samples a reference of its own: with --lora_rank, name one by --reference",
    ),
    Rule(
        ("comparisons", "offload"),
        lambda config: config.comparisons == "anchor" and config.offload,
        "--comparisons anchor and --offload cannot be combined: the reference is sampled from, too",
    ),
    Rule(
        ("lora_dropout",),
        lambda config: config.lora_dropout and config.compares_with_old,
        "--lora_dropout would make ratios random: this objective compares the policy with itself",
    ),
    Rule(
        ("eval_at",),
        lambda config: (
            config.eval_at
            and not all(part.strip().isdecimal() for part in config.eval_at.split(","))
        ),
        "--eval_at must be comma-separated whole numbers, got {eval_at!r}",
    ),
    Rule(
        ("eval_at",),
        lambda config: max(config.evaluated_at, default=0) > config.updates,
        "--eval_at must be updates of the run, at most {updates}, got {eval_at!r}",
    ),
    # What a sampler that differs from the policy needs, and excludes.
    Rule(
        ("sampler_ratio_cap",),
        lambda config: 0 < config.sampler_ratio_cap < 1,
        "--sampler_ratio_cap must be 0 or at least 1, got {sampler_ratio_cap!r}",
    ),
    Rule(
        ("sampler_ratio_cap", "old_logprobs"),
        lambda config: config.sampler_ratio_cap and config.old_logprobs == "sampler",
        "--sampler_ratio_cap and --old_logprobs sampler cannot be combined: both correct the same",
    ),
    Rule(
        ("old_logprobs", "sampler"),
        lambda config: config.old_logprobs == "sampler" and config.sampler == "transformers",
        "--old_logprobs sampler needs log-probs of the sampler, and --sampler transformers gives none",
    ),
    Rule(
        ("old_logprobs",),
        lambda config: config.old_logprobs == "sampler" and config.from_mixture,
        "--old_logprobs sampler needs log-probs of the sampler, and responses of --mixture have none",
    ),
    Rule(
        ("sampler_ratio_cap", "sampler"),
        lambda config: config.sampler_ratio_cap and config.sampler == "transformers",
        "--sampler_ratio_cap needs log-probs of the sampler, and --sampler transformers gives none",
    ),
    Rule(
        ("sampler_ratio_cap",),
        lambda config: config.sampler_ratio_cap and config.from_mixture,
        "--sampler_ratio_cap needs log-probs of the sampler, and responses of --mixture have none",
    ),
    Rule(
        ("old_logprobs",),
        lambda config: config.old_logprobs == "sampler" and not config.compares_with_old,
        "--old_logprobs sampler changes no ratio: the loss of this objective has none",
    ),
    Rule(
        ("top_k", "top_p", "min_p"),
        lambda config: config.from_mixture and config.truncates,
        "--top_k, --top_p and --min_p exclude a mixture, whose responses must be samples of it",
    ),
    Rule(
        ("prompts_per_update", "prompts_per_minibatch"),
        lambda config: config.prompts_per_update % config.prompts_per_minibatch,
        "--prompts_per_update ({prompts_per_update}) must be a multiple of --prompts_per_minibatch "
        "({prompts_per_minibatch}), so that every step uses the same number of prompts",
    ),
    *ENVIRONMENT_RULES,
)


class UpdatesConfig(Flags):
    """How many updates there are, how large each is, and when its rollouts are sampled."""

    section = "updates"
    updates: int = option(
        500,
        "Number of updates: one batch of rollouts, then --inner_epochs passes over it.",
        at_least=1,
        changeable=True,
    )
    prompts_per_update: int = option(
        32, "Prompts per update, summed over processes (first author: 64).", at_least=1
    )
    prompts_per_minibatch: int = option(
        8,
        "Prompts per optimizer step, summed over processes (first author: 4); 0 uses as many steps per pass as the "
        "objective's paper (1 unless: GSPO 4, and SAPO as GSPO, VESPO 8, DAPO and CISPO 16).",
        at_least=0,
    )
    responses_per_prompt: int = option(
        4,
        "K: responses to each prompt (paper: 2). More than two form all K (K − 1) / 2 pairs, averaged.",
        at_least=2,
    )
    inner_epochs: int = option(
        4, "Passes over each update's rollouts (first author: 4).", at_least=1
    )
    rounds_ahead: int = option(
        0,
        "Sample rollouts this many updates before they train, from the policy as it is then. 1 lets vLLM servers "
        "sample while the update before trains; other samplers gain no time. 0 samples from the current policy.",
        at_least=0,
    )
    dynamic_sampling: int = option(
        0,
        "Maximum number of resampling rounds for prompts whose responses all have the same reward; 0 disables "
        "resampling.",
        at_least=0,
    )


class SamplerCorrectionConfig(Flags):
    """What is done about a sampler whose probabilities differ from the policy's."""

    section = "updates"
    old_logprobs: Literal["policy", "sampler"] = option(
        "policy",
        "Old log-probs in the ratios. policy: the policy's, computed before an update's steps. sampler: those that "
        "the sampler reported.",
    )
    sampler_ratio_cap: float = option(
        0.0,
        "Truncate the importance weights pi_old / pi_sampler at this value, to correct for a sampler that differs "
        "from the policy (Yao et al. 2025: 2); 0 disables them.",
        at_least=0,
    )


class PretrainingMixConfig(Flags):
    """A pretraining mix (Ouyang et al. 2022, "PPO-ptx")."""

    section = "updates"
    ptx_data: str | InMemory | None = option(
        None,
        "Texts of a pretraining mix (PPO-ptx), in the layouts of demonstrations. All texts of --split are used, "
        "whatever --limit says. Default: no mix.",
        python=list,
    )
    ptx_coef: float = option(
        1.0,
        "Weight of the pretraining mix's loss, which is in nats per token.",
        above=0,
        needs="ptx_data",
        changeable=True,
    )
    ptx_batch_size: int = option(
        8,
        "Texts of the pretraining mix per optimizer step, summed over processes.",
        at_least=1,
        needs="ptx_data",
    )


class RolloutLogConfig(Flags):
    """The updates whose rollouts are logged, or printed."""

    section = "updates"
    samples_every: int = option(
        20,
        "Print a table of sampled responses every this many updates; 0 disables it.",
        at_least=0,
        changeable=True,
    )
    log_rollouts: int = option(
        1,
        "Log rollouts every this many updates, for `fastp3o rollouts`; 0 disables it.",
        at_least=0,
        changeable=True,
    )
    log_rollouts_prompts: int = option(
        8,
        "Prompts of an update whose rollouts are logged; 0 logs all.",
        at_least=0,
        needs="log_rollouts",
        changeable=True,
    )


class OnlineConfig(
    ObjectiveConfig,
    SamplerCorrectionConfig,
    UpdatesConfig,
    PretrainingMixConfig,
    RolloutLogConfig,
    EnvironmentConfig,
    PolicyConfig,
    RewardConfig,
    LanguageJudgeConfig,
    ComparisonConfig,
    PenaltyConfig,
    StageConfig,
):
    """Rollouts, rewards and evaluations; objectives add their own settings.

    objective_class: what trains, `module:class`. assumes_own_samples: whether the gradient is a
    mean over samples of the policy; if not, any responses serve. sampler_correction: what weighs
    responses that are no such samples. paper_minibatches: steps of a pass in the objective's paper.
    """

    section = "updates"
    rules: ClassVar[tuple[Rule, ...]] = RULES
    objective_class: ClassVar[str]
    assumes_own_samples: ClassVar[bool] = True
    sampler_correction: ClassVar[str] = "--sampler_ratio_cap"
    paper_minibatches: ClassVar[int] = 1

    prompts: str | InMemory = required(
        "Training prompts: a hub name (or name:config), or JSONL or parquet files; several are comma-separated.",
        python=list,
    )
    eval_prompts: str | InMemory | None = option(
        None,
        "Evaluation prompts. Several sets, each with metrics of its own: NAME=SOURCE,NAME=SOURCE. Default: no "
        "evaluations.",
        python=list,
    )
    reference: str | None = option(
        None,
        "Model that the KL is measured against. Default: the starting model, or with --lora_rank the policy without "
        "its adapters, which takes no memory. A loss that reads no reference (--kl_coef 0) loads one, and reports a "
        "KL, only if this is set.",
    )
    reference_every: int = option(
        0,
        "Copy the policy's weights to the reference every this many updates; 0 keeps the reference fixed.",
        at_least=0,
    )
    reference_decay: float = option(
        0.0,
        "Moving average: each update sets the reference to decay * reference + (1 - decay) * policy; 0 keeps the "
        "reference fixed.",
        at_least=0,
        below=1,
    )
    offload: bool = option(
        False,
        "Keep reference and reward model on the CPU between uses, to save GPU memory.",
        changeable=True,
    )

    learning_rate: float = option(
        1e-6,
        "Peak learning rate of AdamW. 0: search for it from 1e-6 on, with --kl_per_update 0.3.",
        at_least=0,
        changeable=True,
    )
    kl_per_update: float | None = option(
        None,
        "Target KL per update, in nats per response; the learning rate is adapted to reach it. Default: 0.3 if "
        "--learning_rate is 0, else the learning rate is not adapted.",
        above=0,
        changeable=True,
    )
    interrupt_rollouts: bool = option(
        False,
        "Continue unfinished responses with the new weights instead of waiting for them.",
        needs="rounds_ahead",
    )
    mask_truncated: bool = option(
        False,
        "Exclude responses without an end-of-sequence from the loss; they still count in the baselines of others.",
    )
    eval_batch_size: int = option(
        64,
        "Prompts evaluated at once on one device.",
        at_least=1,
        needs="eval_prompts",
        changeable=True,
    )
    eval_responses_per_prompt: int = option(
        1, "Responses to each evaluation prompt.", at_least=1, needs="eval_prompts"
    )
    eval_greedy: bool = option(
        False,
        "Also evaluate greedy decoding, as greedy/reward and so on.",
        needs="eval_prompts",
        changeable=True,
    )
    eval_at: str | Sequence[int] = option(
        "",
        "Also evaluate after these updates, comma-separated (10,20,50).",
        needs="eval_prompts",
        python=list,
        changeable=True,
    )

    def derived(self) -> dict[str, Any]:
        values = super().derived()
        if not self.learning_rate:
            values |= {
                "learning_rate": FIRST_RATE,
                "kl_per_update": self.kl_per_update or KL_PER_UPDATE,
            }
        if self.minibatch_yields or not self.prompts_per_minibatch:
            values["prompts_per_minibatch"] = self.largest_minibatch()
        return values

    def largest_minibatch(self) -> int:
        """The prompts of a minibatch where none is set that divides the prompts of an update."""
        wanted = self.prompts_per_minibatch
        wanted = wanted or self.prompts_per_update // gcd(
            self.prompts_per_update, self.paper_minibatches
        )
        if not self.minibatch_yields:
            return wanted
        return max(size for size in range(1, wanted + 1) if self.prompts_per_update % size == 0)

    @property
    def reads_rewards(self) -> bool:
        """Whether the loss reads rewards."""
        return True

    @property
    def reads_sampler(self) -> bool:
        """Whether the loss reads the log-probs of what sampled, to weigh the difference to the
        policy.
        """
        return bool(self.sampler_ratio_cap)

    @property
    def compares_with_old(self) -> bool:
        """Whether the loss compares the policy's log-probs with the old ones."""
        return True

    @property
    def from_mixture(self) -> int:
        """Number of a prompt's responses, the last ones, that a mixture of policy and reference
        samples.
        """
        return 0

    @property
    def process_rewards(self) -> bool:
        """Whether rewards of turns and tokens come where they are given, and not at a response's
        end.
        """
        return False

    @property
    def samples_reference(self) -> bool:
        """Whether responses come from the reference, too: a part of a mixture, or what all others
        are compared with.
        """
        return bool(self.from_mixture or self.comparisons == "anchor")

    @property
    def reference_moves(self) -> bool:
        return bool(self.reference_every or self.reference_decay)

    @property
    def minibatch_yields(self) -> bool:
        """Whether minibatches are as large as updates allow: somebody has set the size of updates
        alone.
        """
        return "prompts_per_update" in self.named and "prompts_per_minibatch" not in self.named

    @property
    def minibatches_per_update(self) -> int:
        return self.prompts_per_update // self.prompts_per_minibatch

    @property
    def steps_per_update(self) -> int:
        return self.inner_epochs * self.minibatches_per_update

    @property
    def needs_reference(self) -> bool:
        """Whether a reference is loaded and run: the loss reads one, the user names or moves one,
        or it is sampled.
        """
        return bool(
            self.loss_reads_reference
            or self.reference
            or self.reference_moves
            or self.samples_reference
        )

    @property
    def loss_reads_reference(self) -> bool:
        """Whether the loss, or what is sampled, is another with another reference."""
        return True

    def evaluates_after(self, step: int, *, last: int) -> bool:
        return step in self.evaluated_at or super().evaluates_after(step, last=last)

    @property
    def evaluated_at(self) -> set[int]:
        return {int(part) for part in str(self.eval_at).split(",")} if self.eval_at else set()

    def build(self) -> "Objective":
        """The objective that this configuration trains with."""
        module, _, name = self.objective_class.partition(":")
        return getattr(import_module(f"fastp3o.objectives.{module}"), name)(self)


# --- options that some objectives share -----------------------------------------------------------


class KLConfig(Flags):
    """A penalty on the KL."""

    kl_coef: float = option(
        0.05,
        "Beta, the weight of the KL to the reference; 0 disables the penalty.",
        at_least=0,
        changeable=True,
    )
    target_kl: float | None = option(
        None,
        "Target of the KL to the reference, in nats per response, that --kl_coef is adapted to before each update: "
        "halved below two thirds of the target, doubled above one and a half times, while the KL is not on its way "
        "there (after Schulman et al. 2017). Default: --kl_coef is fixed.",
        above=0,
        changeable=True,
    )

    @property
    def loss_reads_reference(self) -> bool:
        return self.kl_coef > 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.target_kl and not self.kl_coef:
            raise UserError("--target_kl adapts --kl_coef, which must be above 0 to begin with")


class RewardScalingConfig(Flags):
    """Scaling of rewards for objectives that see only their differences."""

    reward_scaling: Literal["difference", "absolute", "none"] = option(
        "difference",
        "Scale rewards. difference: by the running standard deviation of pairwise differences, which keeps the "
        "invariance to offsets per prompt. absolute: by that of the rewards themselves, which breaks it. none: do "
        "not scale.",
    )
    reward_clip: float = option(
        10.0,
        "Bound on what is scaled, differences or rewards, after the scaling (first author: 10); 0 disables it.",
        at_least=0,
        changeable=True,
    )


MIXTURE_RULES = (
    Rule(
        ("mixture", "lora_rank", "reference"),
        lambda config: config.mixture and config.lora_rank and not config.reference,
        "--mixture samples from a reference of its own: with --lora_rank, name one by --reference",
    ),
    Rule(
        ("mixture", "offload"),
        lambda config: config.mixture and config.offload,
        "--mixture and --offload cannot be combined: the reference is sampled from, too",
    ),
    Rule(
        ("mixture", "sampler"),
        lambda config: config.mixture and config.sampler != "engine",
        "--mixture needs --sampler engine",
    ),
)


class MixtureConfig(Flags):
    """Samples from the mixture π^(1 − β) π_ref^β, token by token."""

    rules: ClassVar[tuple[Rule, ...]] = MIXTURE_RULES

    mixture: float = option(
        0.0,
        "Beta: the reference's share in the mixture pi^(1 - beta) pi_ref^beta that is sampled; 0 samples the policy.",
        at_least=0,
        at_most=1,
    )
