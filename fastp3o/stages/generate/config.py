"""The options of sampling without training."""

from dataclasses import dataclass, field
from typing import ClassVar

from fastp3o.config import RunConfig, option, required
from fastp3o.precision import PRECISIONS
from fastp3o.rewards.config import RemoteConfig
from fastp3o.rollouts.config import SamplingConfig
from fastp3o.stages.generate.selection import FLAGS_OF, PAIRS, SelectionConfig


@dataclass(frozen=True, kw_only=True)
class GenerateConfig(RemoteConfig, SelectionConfig, SamplingConfig, RunConfig):
    """Samples responses, rewards them, and keeps some as data: best-of-n, rejection sampling, preference pairs."""

    CHANGEABLE: ClassVar[tuple[str, ...]] = ("trust_remote_code", "offload")

    model: str = required("The policy that is sampled: a Hugging Face causal LM, as a hub name or a folder.")
    reward: str = required(
        "What responses are kept by: a reward model (folder or hub name), a function, as module:function, or a URL."
    )
    responses_per_prompt: int = option(8, "n: responses to each prompt.")
    precision: str = field(
        default="auto",
        metadata={
            "help": "Arithmetic of policy and reward model. auto: on a GPU fp16, as P3O samples, else fp32.",
            "choices": list(PRECISIONS),
        },
    )
    offload: bool = option(False, "Keep the reward model on the CPU between uses.")

    def __post_init__(self) -> None:
        self.check_values()
        self.check_run()
        self.check_sampling()
        self.check_selection()
        self.check_remote(self.reward)
        self.check_at_least(2 if self.keep in PAIRS else 1, "responses_per_prompt")
        if "accept" in FLAGS_OF[self.keep] and self.accept >= self.responses_per_prompt:
            raise ValueError(
                f"--accept ({self.accept}) must be below --responses_per_prompt ({self.responses_per_prompt}): "
                "all of them would be accepted"
            )

    @classmethod
    def changeable(cls) -> set[str]:
        """A batch is what a resumed run samples again: with other numbers of prompts at once, or compiled steps, it
        would be rounded otherwise.
        """
        return super().changeable() - {"rollout_batch_size", "rollout_memory", "compile_rollouts"}
