"""The options of sampling without training."""

from typing import Literal

from fastp3o.config import Flags, PrecisionName, RunConfig, option, required
from fastp3o.errors import UserError
from fastp3o.evaluation.config import JudgeConfig, SamplingConfig
from fastp3o.rewards.config import ComparisonConfig
from fastp3o.sources import Source

JUDGED = "judged"  # by verdicts; all others by rewards
PAIRS = ("rso", "rs_dpo", JUDGED, "revised_pairs")
REVISED = ("revised", "revised_pairs")
NOTHING = "none"
TOURNAMENT = "tournament"
# Which responses are compared follows from the choice itself.
PAIRS_OF_ITS_OWN = (
    TOURNAMENT,
    JUDGED,
    *REVISED,
)
REJECTION_SAMPLING = ("keep=rejection_sampling", "keep=rso")


class SelectionConfig(Flags):
    """Choice of the sampled responses to keep."""

    section = "choice of responses"
    keep: Literal[
        "all",
        "best",
        "tournament",
        "rest",
        "rejection_sampling",
        "rso",
        "rs_dpo",
        "judged",
        "revised",
        "revised_pairs",
        "none",
    ] = option(
        "best",
        "Responses to keep for each prompt. As data for SFT: all: every response. best: the one with the highest "
        "reward. tournament: the winner of a knockout by a reward that compares, in n - 1 comparisons. rest: those "
        "with a reward above --threshold (ReST). rejection_sampling: a sample of the policy that is optimal for the "
        "reward. As preferences: rso: random pairs of such a sample. rs_dpo: all pairs more than --min_gap apart. "
        "judged: random pairs, ordered by a judge. With --principles: revised: revisions, as data for SFT. "
        "revised_pairs: revisions preferred to the first responses. none: no file.",
        changeable=True,
    )
    threshold: float = option(
        0.0,
        "Reward above which --keep rest keeps a response (ReST's τ).",
        needs="keep=rest",
        changeable=True,
    )
    min_gap: float = option(
        0.0,
        "Minimum reward gap between chosen and rejected (RS-DPO: τ log(η/(1-η))).",
        at_least=0,
        needs="keep=rs_dpo",
        changeable=True,
    )
    beta: float = option(
        0.5,
        "Rejection-sampling temperature: a response is accepted with probability exp((r − max r) / beta) (RSO: 0.5).",
        above=0,
        needs=REJECTION_SAMPLING,
        changeable=True,
    )
    accept: int = option(
        2,
        "Number of responses to accept per prompt (RSO: 8 of 64).",
        at_least=1,
        needs=REJECTION_SAMPLING,
        changeable=True,
    )
    keep_unfinished: bool = option(
        False,
        "Also keep responses that were cut off; training on them teaches the model to stop there.",
        changeable=True,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.keep == "rso" and self.accept < 2:
            raise UserError(f"--accept must be at least 2 for pairs, got {self.accept}")


class GenerateConfig(JudgeConfig, SelectionConfig, ComparisonConfig, SamplingConfig, RunConfig):
    """Samples responses, rewards or judges them, and keeps some as data: best-of-n, rejection
    sampling, preferences.
    """

    model: str = required(
        "Policy to sample from: a Hugging Face causal LM, as a hub name or a folder."
    )
    reward: str | None = option(
        None,
        "Reward by which responses are kept, except with --keep judged: a reward model (folder or hub name), a "
        "function, as module:function, a URL, or environment.",
    )
    principles: str | None = option(
        None,
        "File by which the model criticizes and rewrites its responses: one principle per line, or .jsonl with "
        'requests {"critique": ..., "revision": ...} (Constitutional AI, arXiv 2212.08073).',
        needs=("keep=revised", "keep=revised_pairs"),
    )
    revisions: int = option(
        1, "Number of rounds, each a critique and a revision.", at_least=1, needs="principles"
    )
    responses_per_prompt: int = option(8, "n: responses to each prompt.", at_least=1)
    precision: PrecisionName = option(
        "auto",
        "Arithmetic of policy and reward model. fp32: weights in fp32. bf16-autocast: weights in fp32, computed in "
        "bf16. bf16, fp16: half-precision weights. auto: on a GPU fp16, as P3O samples, or bf16 for a model that "
        "overflows fp16; else fp32.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.has_turns and self.keep != NOTHING:
            answers = "--environment says" if self.environment else "--tools say"
            raise UserError(
                f"--keep {self.keep} would train on what the {answers}: give --keep none"
            )
        if self.keep in REVISED and (self.reward or self.sampler == "vllm" or not self.principles):
            raise UserError(
                f"--keep {self.keep} revises by --principles, without --reward and without --sampler vllm"
            )
        if not self.reward and self.keep not in (JUDGED, NOTHING, *REVISED):
            raise UserError(f"--keep {self.keep} keeps responses by their rewards: give --reward")
        if self.keep == JUDGED and not (self.judge or self.judge_url):
            raise UserError(
                "--keep judged asks a judge: give --judge, or --judge_url with --judge_model"
            )
        if self.keep in PAIRS and self.keep not in REVISED and self.responses_per_prompt < 2:
            raise UserError(
                f"--responses_per_prompt must be at least 2 for pairs, got {self.responses_per_prompt}"
            )
        if self.comparisons != "all":
            self.check_comparisons()
        if f"keep={self.keep}" in REJECTION_SAMPLING and self.accept >= self.responses_per_prompt:
            raise UserError(
                f"--accept ({self.accept}) must be below --responses_per_prompt ({self.responses_per_prompt})"
            )

    def check_comparisons(self) -> None:
        """Raises UserError where a choice of pairs has no effect."""
        chosen = f"--comparisons {self.comparisons}"
        if self.keep in PAIRS_OF_ITS_OWN:
            raise UserError(
                f"--keep {self.keep} chooses the pairs that are compared: leave out {chosen}"
            )
        if not self.reward:
            raise UserError(f"{chosen} has no effect without --reward")
        if self.responses_per_prompt < 2:
            raise UserError(
                f"{chosen} needs pairs of responses: --responses_per_prompt must be at least 2, got 1"
            )

    @property
    def scorers(self) -> list[Source]:
        return [self.reward] if self.reward else []

    @classmethod
    def changeable(cls) -> set[str]:
        """Without the sampler's: a resumed run samples its last batch again, and these would round
        it differently.
        """
        return super().changeable() - {"rollout_batch_size", "rollout_memory"}
