"""Options of policy gradients with an advantage for each response."""

from typing import ClassVar, Literal

from fastp3o.config import DataConfig, Flags, option
from fastp3o.objectives.config.base import (
    ONE_STEP_RATE,
    KLConfig,
    OnlineConfig,
    RewardScalingConfig,
    SamplerCorrectionConfig,
    UpdatesConfig,
)

KLEstimator = Literal["k1", "k2", "k3"]

LossMean = Literal["sequence", "token", "constant"]


# --- what they share ------------------------------------------------------------------------------


class PolicyGradientConfig(
    RewardScalingConfig, KLConfig, SamplerCorrectionConfig, UpdatesConfig, DataConfig
):
    """Advantages, KL and entropy."""

    kl_estimator: KLEstimator = option(
        "k1",
        "Estimator of the KL to the reference. k1: log π_old − log π_ref of a response, subtracted from its reward; "
        "so --scale_advantages divides by its deviation, too, and it decides where rewards are equal, whatever "
        "--kl_coef. k2, k3: Schulman's estimators, per token, in the loss. The gradient of k2 is that of the KL; "
        "that of k3 (GRPO's paper) belongs to the reverse KL, which cost GRPO reward − KL in the study, so k1 is "
        "the default.",
        needs="kl_coef",
    )
    entropy_coef: float = option(
        0.0,
        "Weight of an entropy bonus, in nats, averaged over tokens as the loss is; 0 disables it.",
        at_least=0,
        changeable=True,
    )


class RatioConfig(PolicyGradientConfig):
    """Clipped ratios."""

    prompts_per_minibatch: int = 0
    inner_epochs: int = 1
    clip_low: float = option(
        0.2,
        "Lower clipping range: ratios count down to 1 − clip_low.",
        above=0,
        at_most=1,
        changeable=True,
    )
    clip_high: float = option(
        0.2, "Upper clipping range: ratios count up to 1 + clip_high.", above=0, changeable=True
    )


# --- baselines over all responses, without clipping by default ------------------------------------


class RLOOConfig(RatioConfig, OnlineConfig, objective="rloo"):
    """RLOO (arXiv 2402.14740): the baseline of a response is the mean reward of its prompt's
    others.
    """

    objective_class: ClassVar[str] = "policy_gradient:RLOO"
    learning_rate: float = ONE_STEP_RATE
    further_needs: ClassVar = dict.fromkeys(
        ("clip_low", "clip_high"), ("clipping=response", "clipping=token")
    )
    clipping: Literal["none", "response", "token"] = option(
        "none",
        "Ratios that are clipped. none: no ratios, for one optimizer step per update. response: each response's "
        "ratio (as in TRL). token: each token's ratio (as in verl and OpenRLHF).",
    )

    @property
    def compares_with_old(self) -> bool:
        return self.clipping != "none"


class REINFORCEConfig(RLOOConfig, objective="reinforce"):
    """REINFORCE (Williams 1992): the baseline is the mean reward of all responses of an update."""

    objective_class: ClassVar[str] = "policy_gradient:REINFORCE"
    reward_scaling: Literal["absolute", "none"] = option(
        "absolute",
        "Scale rewards. absolute: by their running standard deviation. none: do not scale.",
    )


# --- GRPO and objectives that clip ratios as it does ----------------------------------------------


class ClippedConfig(RatioConfig):
    """Clipped ratios, and advantages within a prompt's responses. A round makes as many steps as in
    each paper.
    """

    responses_per_prompt: int = option(
        8,
        "K: responses to each prompt (GRPO 64, DAPO 16, Dr. GRPO 8). With two, scaled advantages are only signs.",
        at_least=2,
    )
    scale_advantages: bool = option(
        True, "Divide advantages by the standard deviation of their prompt's rewards."
    )


# Defaults of GRPO and of its variants, which differ in nothing else but CISPO's loss.
GRPO = {"learning_rate": ONE_STEP_RATE, "kl_coef": 0.04}
DR_GRPO = {
    "learning_rate": ONE_STEP_RATE,
    "kl_coef": 0.0,
    "loss_mean": "constant",
    "scale_advantages": False,
}
DAPO = {
    "learning_rate": 1e-6,
    "kl_coef": 0.0,
    "loss_mean": "token",
    "clip_high": 0.28,
    "dynamic_sampling": 3,
}
GRPO_PLUS = DAPO | {"mask_truncated": True}
CISPO = DAPO | {"clip_low": 1.0, "clip_high": 4.0}


class TokenMeanConfig(Flags):
    """How the losses of tokens are averaged."""

    loss_mean: LossMean = option(
        "sequence",
        "How token losses are averaged. sequence: over each response's tokens, then over responses. token: over all "
        "tokens of a minibatch (DAPO). constant: summed, then divided by --max_response_tokens (Dr. GRPO).",
    )


class GRPOConfig(TokenMeanConfig, ClippedConfig, OnlineConfig, objective="grpo", preset=GRPO):
    """GRPO (arXiv 2402.03300): the mean over a response's tokens, then over responses. The paper's
    KL is k3.
    """

    objective_class: ClassVar[str] = "policy_gradient:GRPO"


class DrGRPOConfig(
    TokenMeanConfig, ClippedConfig, OnlineConfig, objective="dr_grpo", preset=DR_GRPO
):
    """Dr. GRPO (arXiv 2503.20783): lengths and deviations divide nothing; no KL."""

    objective_class: ClassVar[str] = "policy_gradient:GRPO"


class DAPOConfig(TokenMeanConfig, ClippedConfig, OnlineConfig, objective="dapo", preset=DAPO):
    """DAPO (arXiv 2503.14476): clipped higher above, the mean over all tokens, ties sampled again;
    no KL.
    """

    objective_class: ClassVar[str] = "policy_gradient:GRPO"
    paper_minibatches: ClassVar[int] = 16


class GRPOPlusConfig(
    TokenMeanConfig, ClippedConfig, OnlineConfig, objective="grpo_plus", preset=GRPO_PLUS
):
    """GRPO+ (DeepCoder, 2025): DAPO's loss without responses that were cut off; no KL, no entropy
    bonus.
    """

    objective_class: ClassVar[str] = "policy_gradient:GRPO"
    paper_minibatches: ClassVar[int] = 16


class CISPOConfig(TokenMeanConfig, ClippedConfig, OnlineConfig, objective="cispo", preset=CISPO):
    """CISPO (MiniMax-M1, arXiv 2506.13585): DAPO, but clipped ratios weigh log π, up to 5 (ScaleRL,
    2510.13786).
    """

    objective_class: ClassVar[str] = "policy_gradient:CISPO"
    paper_minibatches: ClassVar[int] = 16


class GSPOConfig(ClippedConfig, OnlineConfig, objective="gspo"):
    """GSPO (arXiv 2507.18071): the geometric mean of the ratios of a response's tokens is clipped."""

    objective_class: ClassVar[str] = "policy_gradient:GSPO"
    paper_minibatches: ClassVar[int] = 4
    clip_low: float = 3e-4
    clip_high: float = 4e-4
    kl_coef: float = 0.0


# --- a soft gate in place of clipping ---------------------------------------------------------


class SAPOConfig(PolicyGradientConfig, OnlineConfig, objective="sapo"):
    """SAPO (arXiv 2511.20347): a sigmoid of token ratios in place of clipping; otherwise as
    GRPO, without a KL.
    """

    objective_class: ClassVar[str] = "policy_gradient:SAPO"
    paper_minibatches: ClassVar[int] = 4  # GSPO's, by the same authors; SAPO's was not looked up
    prompts_per_minibatch: int = 0
    inner_epochs: int = 1
    responses_per_prompt: int = option(8, "K: responses to each prompt.", at_least=2)
    kl_coef: float = 0.0
    tau_pos: float = option(
        1.0,
        "Tau where the advantage is above 0: the larger, the sooner a token whose ratio is not 1 counts for less "
        "(paper: 1).",
        above=0,
        changeable=True,
    )
    tau_neg: float = option(
        1.05,
        "Tau where the advantage is not above 0 (paper: 1.05, since those tokens are the less stable ones).",
        above=0,
        changeable=True,
    )


# --- objectives for off-policy responses ----------------------------------------------------------


class VESPOConfig(PolicyGradientConfig, OnlineConfig, objective="vespo"):
    """VESPO (arXiv 2602.10693): a response's whole ratio ρ weighs its log π by ρ^k e^(λ (1 − ρ))."""

    objective_class: ClassVar[str] = "policy_gradient:VESPO"
    paper_minibatches: ClassVar[int] = 8
    prompts_per_minibatch: int = 0
    inner_epochs: int = 1
    responses_per_prompt: int = option(8, "K: responses to each prompt (authors: 8).", at_least=2)
    kl_coef: float = 0.0
    k_pos: float = option(
        2.0,
        "Exponent k of the weight for responses with an advantage of at least 0 (authors: 2).",
        at_least=0,
        changeable=True,
    )
    lambda_pos: float = option(
        3.0,
        "Lambda of the weight for responses with an advantage of at least 0 (authors: 3).",
        above=0,
        changeable=True,
    )
    k_neg: float = option(
        3.0,
        "Exponent k of the weight for responses with a negative advantage (authors: 3).",
        at_least=0,
        changeable=True,
    )
    lambda_neg: float = option(
        2.0,
        "Lambda of the weight for responses with a negative advantage (authors: 2).",
        above=0,
        changeable=True,
    )


class REBELConfig(PolicyGradientConfig, OnlineConfig, objective="rebel"):
    """REBEL (arXiv 2404.16767): a quadratic step from the policy that sampled."""

    objective_class: ClassVar[str] = "policy_gradient:REBEL"
    assumes_own_samples: ClassVar[bool] = False
    eta: float = option(
        1.0,
        "Step size: the difference of a pair's log-ratios is regressed to eta times the difference of its rewards.",
        above=0,
        changeable=True,
    )
    kl_coef: float = 0.0


class CoPGConfig(PolicyGradientConfig, OnlineConfig, objective="copg"):
    """CoPG (arXiv 2406.19185): an off-policy gradient, in which each response of a pair is the
    other one's baseline.
    """

    objective_class: ClassVar[str] = "policy_gradient:CoPG"
    compares_with_old: ClassVar[bool] = False
    assumes_own_samples: ClassVar[bool] = False
    kl_coef: float = option(
        0.06,
        "Beta, the weight of the KL to the reference (paper: 0.03 to 0.1).",
        above=0,
        changeable=True,
    )
    kl_estimator: Literal["k1"] = option(
        "k1", "k1: the KL of the policy in each step is part of its rewards."
    )


class OAPLConfig(PolicyGradientConfig, OnlineConfig, objective="oapl"):
    """OAPL (arXiv 2602.19362): regression of log-ratios to what sampled, however old, on optimal
    advantages.
    """

    objective_class: ClassVar[str] = "policy_gradient:OAPL"
    assumes_own_samples: ClassVar[bool] = False
    old_logprobs: Literal["policy", "sampler"] = "sampler"
    responses_per_prompt: int = option(
        8, "K: responses to each prompt, from which its value is estimated.", at_least=2
    )
    kl_coef: float = 0.0
    beta1: float = option(
        1.0,
        "Temperature of the value estimate, beta1 log mean exp(r / beta1) (paper: 1).",
        above=0,
        changeable=True,
    )
    beta2: float = option(
        1e-3,
        "KL weight: log-ratios are regressed to (r - value) / beta2 (paper: 1e-3).",
        above=0,
        changeable=True,
    )
