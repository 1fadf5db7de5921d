"""Options of PPO and of its critic."""

from typing import ClassVar, Literal

from fastp3o.config import option
from fastp3o.objectives.config.base import KLConfig

PENALTY = ("step_bound=penalty", "step_bound=both")

CLIP = ("step_bound=clip", "step_bound=both")


class CriticConfig(KLConfig):
    """A critic, and the advantages of tokens that come of it."""

    gae_lambda: float = option(0.95, "Lambda of GAE, without discount.", at_least=0, at_most=1, changeable=True)
    process_rewards: bool = option(True, "Rewards of turns and tokens come where they arise. Off: at the end.")
    critic_learning_rate: float = option(1e-5, "The critic's peak rate (OpenRLHF: 9e-6).", above=0, changeable=True)
    value_coef: float = option(0.1, "Weight of the value loss (TRL: 0.1).", at_least=0, changeable=True)
    value_clip_range: float = option(10.0, "How far values move before their loss is cut.", above=0, changeable=True)
    reward_scaling: Literal["absolute", "none"] = option(
        "absolute", "absolute: divide rewards by their running standard deviation (first author's code); none."
    )
    reward_clip: float = option(10.0, "Scaled rewards' bound (first author: 10); 0 none.", at_least=0, changeable=True)


class PPOConfig(CriticConfig, objective="ppo"):
    """PPO (arXiv 1707.06347): token by token, with a critic; responses to a prompt are not compared."""

    objective_class: ClassVar[str] = "ppo:PPO"
    clip_range: float = option(0.2, "Epsilon of tokens' ratios (paper: 0.2).", above=0, needs=CLIP, changeable=True)
    step_bound: Literal["clip", "penalty", "both"] = option(
        "clip", "clip: ratios count within 1 ± clip_range; penalty: a KL to the policy before, in the loss; both."
    )
    step_kl_coef: float = option(1.0, "Weight of that KL.", above=0, needs=PENALTY, changeable=True)
    entropy_coef: float = option(0.0, "Weight of an entropy bonus, in nats per token.", at_least=0, changeable=True)
