"""Options of PPO and of its critic."""

from typing import ClassVar, Literal

from fastp3o.config import option
from fastp3o.objectives.config.base import KLConfig, OnlineConfig, SamplerCorrectionConfig

PENALTY = ("step_bound=penalty", "step_bound=both")

CLIP = ("step_bound=clip", "step_bound=both")


class CriticConfig(KLConfig, SamplerCorrectionConfig):
    """A critic, and the advantages of tokens that come of it."""

    gae_lambda: float = option(
        0.95,
        "Lambda of generalized advantage estimation (GAE); rewards are not discounted.",
        at_least=0,
        at_most=1,
        changeable=True,
    )
    process_rewards: bool = option(
        True,
        "Let advantages see rewards of turns and tokens where they arise. Otherwise their sum comes at the last token.",
    )
    critic_learning_rate: float = option(
        1e-5,
        "Peak learning rate of the critic's AdamW (OpenRLHF: 9e-6 at 7 B).",
        above=0,
        changeable=True,
    )
    value_coef: float = option(
        0.1,
        "Weight of the value loss; the policy's loss has weight 1 (TRL: 0.1).",
        at_least=0,
        changeable=True,
    )
    value_clip_range: float = option(
        10.0,
        "Maximum distance between new values and those of the rollout before their loss is clipped.",
        above=0,
        changeable=True,
    )
    reward_scaling: Literal["absolute", "none"] = option(
        "absolute",
        "Scale rewards. absolute: by their running standard deviation (first author's code). none: do not scale.",
    )
    reward_clip: float = option(
        10.0,
        "Bound on scaled rewards (first author: 10); 0 disables it.",
        at_least=0,
        changeable=True,
    )


class TokenRatioConfig(CriticConfig):
    """PPO's loss: a bound on the ratio of each token, and a bonus for entropy."""

    clip_range: float = option(
        0.2, "Clipping epsilon of token ratios (paper: 0.2).", above=0, needs=CLIP, changeable=True
    )
    step_bound: Literal["clip", "penalty", "both"] = option(
        "clip",
        "Bound on how far an update moves the policy. clip: token ratios count within 1 ± clip_range. penalty: a KL "
        "to the policy before, in the loss. both: the two of them.",
    )
    step_kl_coef: float = option(
        1.0,
        "Weight of the KL to the policy before the update, with --step_bound penalty or both.",
        above=0,
        needs=PENALTY,
        changeable=True,
    )
    entropy_coef: float = option(
        0.0,
        "Weight of an entropy bonus, in nats per token; 0 disables it.",
        at_least=0,
        changeable=True,
    )


class PPOConfig(TokenRatioConfig, OnlineConfig, objective="ppo"):
    """PPO (arXiv 1707.06347): token by token, with a critic; responses to a prompt are not
    compared.
    """

    objective_class: ClassVar[str] = "ppo:PPO"
