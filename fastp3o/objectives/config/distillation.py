"""Options of on-policy distillation."""

from collections.abc import Mapping
from typing import ClassVar, Literal

from fastp3o.config import Condition, Flags, Needs, option
from fastp3o.errors import UserError
from fastp3o.objectives.config.base import OnlineConfig
from fastp3o.sources import InMemory

OTHERS = Condition(
    "objective", "another objective: distillation reads neither rewards nor ratios", lambda _: False
)

REFUSED = "missing_eos_penalty length_penalty ngram_penalty overlong_margin dynamic_sampling sampler_ratio_cap"


class TeacherConfig(Flags):
    """What is distilled: the KL to the teacher, and a context that only the teacher sees."""

    kl: Literal["exact", "sampled"] = option(
        "exact",
        "KL(policy || teacher) of a token. exact: over the whole vocabulary (GKD). sampled: log pi - log pi_teacher "
        "of the sampled token is its negative reward in a policy gradient (Thinking Machines 2025; MiniLLM, arXiv "
        "2306.08543).",
    )
    teacher_context: str | None = option(
        None,
        "Text before each prompt that only the teacher sees (context distillation, arXiv 2112.00861, 2209.15189). "
        "It comes before a chat's first message, too, but after a beginning-of-sequence token. The text of a "
        "special token becomes that token, so it can be a message as the chat template writes it. From a file: "
        '"$(cat FILE)". Default: none.',
    )


class DistillationConfig(TeacherConfig, OnlineConfig, objective="distillation"):
    """On-policy distillation (GKD, arXiv 2306.13649) of --reference, the teacher, or of what a
    context makes it say.
    """

    objective_class: ClassVar[str] = "distillation:Distillation"
    compares_with_old: ClassVar[bool] = False
    assumes_own_samples: ClassVar[bool] = False
    reads_rewards: ClassVar[bool] = False
    further_needs: ClassVar[Mapping[str, Needs]] = dict.fromkeys(REFUSED.split(), OTHERS)
    reward: str | InMemory = option(
        "",
        "Rewards that are only logged, named as --reward of other objectives. Default: minus the KL to the teacher.",
        python=list,
    )
    prompts_per_minibatch: int = 0
    inner_epochs: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kl == "sampled" and self.truncates:
            raise UserError(
                "--kl sampled needs samples of the policy: no --top_k, --top_p or --min_p, or --kl exact"
            )
        if self.kl == "exact" and self.tensor_parallel > 1:
            raise UserError(
                "--kl exact reads whole vocabularies, which --tensor_parallel cuts: use --kl sampled"
            )
