"""The options of sampling without training."""

from dataclasses import dataclass

from fastp3o.config import RunConfig, option, required
from fastp3o.errors import UserError
from fastp3o.precision import PRECISIONS
from fastp3o.rewards.config import RemoteConfig
from fastp3o.rollouts.config import SamplingConfig
from fastp3o.stages.generate.selection import KEEP_FLAGS, PAIRS, SelectionConfig


@dataclass(frozen=True, kw_only=True)
class GenerateConfig(RemoteConfig, SelectionConfig, SamplingConfig, RunConfig):
    """Samples responses, rewards them, and keeps some as data: best-of-n, rejection sampling, preference pairs."""

    model: str = required("The policy that is sampled: a Hugging Face causal LM, as a hub name or a folder.")
    reward: str = required(
        "What responses are kept by: a reward model (folder or hub name), a function, as module:function, or a URL."
    )
    responses_per_prompt: int = option(8, "n: responses to each prompt.", at_least=1)
    precision: str = option(
        "auto",
        "Arithmetic of policy and reward model. auto: on a GPU fp16, as P3O samples, else fp32.",
        choices=PRECISIONS,
    )
    offload: bool = option(False, "Keep the reward model on the CPU between uses.", changeable=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.keep in PAIRS and self.responses_per_prompt < 2:
            raise UserError(f"--responses_per_prompt must be at least 2 for pairs, got {self.responses_per_prompt}")
        if "accept" in KEEP_FLAGS[self.keep] and self.accept >= self.responses_per_prompt:
            raise UserError(
                f"--accept ({self.accept}) must be below --responses_per_prompt ({self.responses_per_prompt}): "
                "all of them would be accepted"
            )

    @property
    def scorers(self) -> list[str]:
        return [self.reward]

    @classmethod
    def changeable(cls) -> set[str]:
        """Without the sampler's: a resumed run samples its last batch again, and these would round it differently."""
        return super().changeable() - {"rollout_batch_size", "rollout_memory", "compile_rollouts"}
