"""The baselines' own settings, beside those that all algorithms share."""

from dataclasses import dataclass, field

from fastp3o.config import OnlineConfig, option


@dataclass(frozen=True, kw_only=True)
class PPOConfig(OnlineConfig):
    """PPO for language models: token by token, with a critic. Every response of a prompt counts alone."""

    clip_range: float = option(0.2, "Epsilon of the clipping of a token's ratio (Schulman et al. 2017: 0.2).")
    kl_coef: float = option(0.05, "Beta, the weight of each token's KL penalty.")
    gae_lambda: float = option(0.95, "Lambda of generalised advantage estimation; nothing is discounted.")
    critic_learning_rate: float = option(1e-5, "Peak learning rate of the critic's AdamW (OpenRLHF: 9e-6 at 7 B).")
    value_coef: float = option(0.1, "Weight of the value loss beside the policy's (TRL: 0.1).")
    value_clip_range: float = option(0.2, "Values move at most this far from the rollout's before their loss is cut.")
    reward_scaling: str = field(
        default="absolute",
        metadata={
            "help": "absolute: divide rewards by their running standard deviation (first author's code); none.",
            "choices": ["absolute", "none"],
        },
    )
    reward_clip: float = option(10.0, "Bound on scaled rewards (first author: 10); 0 for none.")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check(self.clip_range > 0, "clip_range", "above 0")
        self.check(self.kl_coef >= 0, "kl_coef", "0 or more")
        self.check(0 <= self.gae_lambda <= 1, "gae_lambda", "within 0 and 1")
        self.check(self.critic_learning_rate > 0, "critic_learning_rate", "above 0")
        self.check(self.value_coef >= 0, "value_coef", "0 or more")
        self.check(self.value_clip_range > 0, "value_clip_range", "above 0")
        self.check(self.reward_clip >= 0, "reward_clip", "0 or more")


@dataclass(frozen=True, kw_only=True)
class OnlineDPOConfig(OnlineConfig):
    """Online DPO: of two fresh responses the one with the higher reward is the chosen one."""

    kl_coef: float = option(0.1, "Beta of DPO's implicit reward, the weight of the KL to the reference.")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check(self.kl_coef > 0, "kl_coef", "above 0")
