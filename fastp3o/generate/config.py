"""The options of sampling without training."""

from typing import Literal

from fastp3o.config import Flags, PrecisionName, RunConfig, option, required
from fastp3o.errors import UserError
from fastp3o.evaluation.config import JudgeConfig, SamplingConfig

JUDGED = "judged"  # by verdicts; all others by rewards
PAIRS = ("rso", "rs_dpo", JUDGED, "revised_pairs")
REVISED = ("revised", "revised_pairs")
NOTHING = "none"
REJECTION_SAMPLING = ("keep=rejection_sampling", "keep=rso")


class SelectionConfig(Flags):
    """Choice of the sampled responses to keep."""

    keep: Literal[
        "all", "best", "rest", "rejection_sampling", "rso", "rs_dpo", "judged", "revised", "revised_pairs", "none"
    ] = option(
        "best",
        "What is kept of the responses to a prompt. For SFT: all; the best; those with a reward above --threshold "
        "(rest); a sample of the policy that is optimal for the reward (rejection_sampling). As preferences: random "
        "pairs of that sample (rso), all pairs more than --min_gap apart (rs_dpo), random pairs by a judge (judged). "
        "By --principles: revisions (revised), or preferred to the responses (revised_pairs). none: no file.",
        changeable=True,
    )
    threshold: float = option(0.0, "--keep rest keeps rewards above it (ReST's τ).", needs="keep=rest", changeable=True)
    min_gap: float = option(0.0, "Least gap (RS-DPO: τ log(η/(1-η)))", at_least=0, needs="keep=rs_dpo", changeable=True)
    beta: float = option(
        0.5, "exp((r - highest r) / beta) is accepted (RSO: 0.5).", above=0, needs=REJECTION_SAMPLING, changeable=True
    )
    accept: int = option(2, "Accepted responses (RSO: 8 of 64).", at_least=1, needs=REJECTION_SAMPLING, changeable=True)
    keep_unfinished: bool = option(False, "Also keep cut responses, which teach to stop there.", changeable=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.keep == "rso" and self.accept < 2:
            raise UserError(f"--accept must be at least 2 for pairs, got {self.accept}")


class GenerateConfig(JudgeConfig, SelectionConfig, SamplingConfig, RunConfig):
    """Samples responses, rewards or judges them, and keeps some as data: best-of-n, rejection sampling, preferences."""

    model: str = required("The policy that is sampled: a Hugging Face causal LM, as a hub name or a folder.")
    reward: str | None = option(
        None,
        "What responses are kept by, except with --keep judged: a reward model (folder or hub name), a function, as "
        "module:function, a URL, or environment.",
    )
    principles: str | None = option(
        None,
        "File by which the model criticises and rewrites its responses: a principle a line, or .jsonl with requests "
        '{"critique": ..., "revision": ...} (Constitutional AI, arXiv 2212.08073).',
        needs=("keep=revised", "keep=revised_pairs"),
    )
    revisions: int = option(1, "Rounds of a critique and a revision.", at_least=1, needs="principles")
    responses_per_prompt: int = option(8, "n: responses to each prompt.", at_least=1)
    precision: PrecisionName = option(
        "auto", "Arithmetic. auto: on a GPU fp16, as P3O samples, or bf16 for what that does not hold; else fp32."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.environment and self.keep != NOTHING:
            raise UserError(f"--keep {self.keep} would train on what the --environment says: give --keep none")
        if self.keep in REVISED and (self.reward or self.sampler == "vllm" or not self.principles):
            raise UserError(f"--keep {self.keep} revises by --principles, without --reward and without --sampler vllm")
        if not self.reward and self.keep not in (JUDGED, NOTHING, *REVISED):
            raise UserError(f"--keep {self.keep} keeps responses by their rewards: give --reward")
        if self.keep == JUDGED and not (self.judge or self.judge_url):
            raise UserError("--keep judged asks a judge: give --judge, or --judge_url with --judge_model")
        if self.keep in PAIRS and self.keep not in REVISED and self.responses_per_prompt < 2:
            raise UserError(f"--responses_per_prompt must be at least 2 for pairs, got {self.responses_per_prompt}")
        if f"keep={self.keep}" in REJECTION_SAMPLING and self.accept >= self.responses_per_prompt:
            raise UserError(
                f"--accept ({self.accept}) must be below --responses_per_prompt ({self.responses_per_prompt})"
            )

    @property
    def scorers(self) -> list[str]:
        return [self.reward] if self.reward else []

    @classmethod
    def changeable(cls) -> set[str]:
        """Without the sampler's: a resumed run samples its last batch again, and these would round it differently."""
        return super().changeable() - {"rollout_batch_size", "rollout_memory"}
