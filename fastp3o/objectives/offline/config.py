"""What the configurations of all offline objectives have in common."""

from dataclasses import dataclass, fields
from typing import ClassVar

from torch import Tensor

from fastp3o.config import SamplerConfig, SupervisedConfig, TrainableConfig, option
from fastp3o.rewards.config import RemoteConfig, RewardConfig
from fastp3o_kernels import Groups
from fastp3o_kernels.losses import k2

# They do nothing without prompts to sample responses to, and without a reward of these.
SAMPLING_FLAGS = ("reward", "sampler", "rollout_batch_size", "rollout_memory", "compile_rollouts")
REWARD_FLAGS = ("reward_weights", "gold_reward", *(flag.name for flag in fields(RemoteConfig)))


@dataclass(frozen=True, kw_only=True)
class PreferenceConfig(RewardConfig, SamplerConfig, TrainableConfig, SupervisedConfig):
    """Learning from fixed preferences: all but the objective's own settings.

    needs_reference: whether the loss takes log-probs of a reference. per_token: whether it takes means over the tokens
    of a response, rather than sums. offload: what evaluations alone need waits on the CPU.
    """

    CHANGEABLE: ClassVar[tuple[str, ...]] = ("reference_logprobs",)
    needs_reference: ClassVar[bool] = True
    per_token: ClassVar[bool] = False
    offload: ClassVar[bool] = True

    objective: str
    reference: str | None = option(
        None,
        "The reference policy, whose log-probs of the data are computed once; the starting model if not given. A stage "
        "of sDPO (arXiv 2403.19270) starts from the model of the one before.",
    )
    reference_logprobs: str | None = option(
        None,
        "Folder where the reference's log-probs are kept, and found by runs on the same data; output_dir if not given.",
    )
    eval_prompts: str | None = option(
        None,
        "Prompts to sample responses to in evaluations, for their KL to the reference and their --reward, as the "
        "online stage does. --eval_split and --eval_limit are of these, too.",
    )
    reward: str = option(
        "",
        "Reward of sampled responses in evaluations: a reward model (folder or hub name), a function, as "
        "module:function, or the URL of what scores responses. Of several, separated by commas, the weighted sum.",
    )
    learning_rate: float = option(1e-6, "Peak learning rate of AdamW (DPO's paper: 1e-6).", above=0, changeable=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_trainable()
        self.check_sampler()
        self.check_alone("eval_prompts", *SAMPLING_FLAGS)
        self.check_alone("reward", *REWARD_FLAGS)
        if self.reward:
            self.check_rewards()
        if self.needs_reference:
            return
        if self.reference_logprobs:
            raise ValueError(f"--reference_logprobs does nothing: --objective {self.objective} has no reference")
        if self.reference and not self.eval_prompts:
            raise ValueError(
                f"--reference does nothing without --eval_prompts: --objective {self.objective} has no reference"
            )

    def check_evaluation(self) -> None:
        if not self.eval_prompts:
            super().check_evaluation()

    @property
    def rewards(self) -> list[str]:
        return super().rewards if self.reward else []

    @property
    def longest_sequence(self) -> int:
        """Tokens of a prompt and a response at most."""
        return self.max_prompt_tokens + self.max_response_tokens

    def losses(self, groups: Groups) -> Tensor:
        """The loss of each pair or response of P groups, [P] or [P, 1]. `groups["reference"]`: log π_ref [P, K]."""
        raise NotImplementedError(f"{type(self).__name__} is not the configuration of an objective")

    def metrics(self, groups: Groups) -> dict[str, Tensor]:
        """Sums over the groups of what is reported beside the loss, 0-d."""
        raise NotImplementedError(f"{type(self).__name__} is not the configuration of an objective")

    def logprobs(self, groups: Groups) -> Tensor:
        """log π of each response, [P, K]: sums over its tokens, or means."""
        return groups.means(groups.token_logprobs) if self.per_token else groups.logprobs

    def ref_logprobs(self, groups: Groups) -> Tensor:
        """The same of the reference."""
        return groups["reference"] / groups.lengths if self.per_token else groups["reference"]


def square_kl(groups: Groups) -> Tensor:
    """Mean over each group's responses of (log π/π_ref)² / 2, [P]: near the reference about the KL to it, in nats per
    response, if the responses are like its own.
    """
    return k2(groups.logprobs, groups["reference"]).mean(1)
