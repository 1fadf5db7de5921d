"""Options of preferences between responses, given once (offline) or by the rewards of fresh
responses (online).
"""

from collections.abc import Mapping
from typing import ClassVar

from fastp3o.config import (
    Condition,
    Flags,
    Needs,
    ObjectiveConfig,
    PolicyConfig,
    SupervisedConfig,
    option,
)
from fastp3o.errors import UserError
from fastp3o.objectives.config.base import MixtureConfig, OnlineConfig
from fastp3o.rewards.config import LanguageJudgeConfig, RewardConfig
from fastp3o.sources import InMemory

# --- what they share ------------------------------------------------------------------------------


class PreferenceConfig(
    ObjectiveConfig, PolicyConfig, RewardConfig, LanguageJudgeConfig, SupervisedConfig
):
    """Learning from fixed preferences: a chosen response has a reward of 1, a rejected one 0.

    Objectives add settings. offload: what only evaluations need is on the CPU.
    """

    anchor: ClassVar[str] = "ref"
    offload: ClassVar[bool] = True
    further_needs: ClassVar[Mapping[str, Needs]] = dict.fromkeys(
        ("sampler", "top_k", "top_p", "min_p", "rollout_batch_size", "rollout_memory"),
        "eval_prompts",
    ) | {
        "gold_reward": "reward",
        "reference": (
            "eval_prompts",
            Condition(
                "objective",
                "an --objective with a reference",
                lambda config: config.needs_reference,
            ),
        ),
    }

    reference: str | None = option(
        None,
        "Reference policy. Default: the starting model, as in each stage of sDPO (arXiv 2403.19270).",
    )
    reference_logprobs: str | None = option(
        None,
        "Folder of the reference's log-probs, which runs on the same data can share. Default: output_dir.",
        changeable=True,
    )
    eval_prompts: str | InMemory | None = option(
        None,
        "Prompts that evaluations sample responses to, for their KL to the reference and their --reward. Default: "
        "none.",
        python=list,
    )
    reward: str | InMemory = option(
        "",
        "Reward of sampled responses in evaluations, named as in online training.",
        needs="eval_prompts",
        python=list,
    )
    learning_rate: float = option(
        1e-6, "Peak learning rate of AdamW (DPO's paper: 1e-6).", above=0, changeable=True
    )

    @property
    def responses_per_prompt(self) -> int:
        """A chosen and a rejected response."""
        return 2

    @property
    def eval_responses_per_prompt(self) -> int:
        """Responses that evaluations sample to each of --eval_prompts."""
        return 1

    @property
    def needs_reference(self) -> bool:
        """Whether the loss takes log-probs of a reference."""
        return bool(self.anchor)


class PairLoss(Flags):
    """A loss of pairs, with its settings: the same one for fixed pairs and for fresh ones that
    rewards label.

    anchor: the log-probs that the policy's are compared with, `ref` or `old`; "" if the loss has
    none. per_token: log-probs are means over a response's tokens instead of sums.
    """

    anchor: ClassVar[str] = "ref"
    per_token: ClassVar[bool] = False


class LikelihoodConfig(Flags):
    """The likelihood of chosen responses, for losses of fixed pairs that have none of their own."""

    sft_coef: float = option(
        0.0,
        "Weight of the chosen response's negative log-likelihood per token, added to the loss (RPO, arXiv "
        "2404.19733: 1); 0 disables it.",
        at_least=0,
        changeable=True,
    )


class FreshPairConfig(PairLoss, OnlineConfig):
    """Learning from fresh pairs that rewards label."""

    objective_class: ClassVar[str] = "preferences:FreshPairs"
    compares_with_old: ClassVar[bool] = False
    assumes_own_samples: ClassVar[bool] = False

    @property
    def loss_reads_reference(self) -> bool:
        return self.anchor == "ref"


# --- losses of pairs, offline and online ----------------------------------------------------------


class LogisticLoss(PairLoss):
    label_smoothing: float = option(
        0.0,
        "Probability that a label is wrong (conservative DPO, Mitchell 2023); 0 trusts all labels.",
        at_least=0,
        below=0.5,
        changeable=True,
    )


class DPOConfig(LogisticLoss, LikelihoodConfig, PreferenceConfig, objective="dpo"):
    """Direct preference optimization (arXiv 2305.18290): logistic loss of the difference of
    log-ratios.
    """

    beta: float = option(
        0.1,
        "Beta: scale of the log-ratios' difference; a larger value stays closer to the reference (paper: 0.1; 0.5 "
        "on TL;DR).",
        above=0,
        changeable=True,
    )


class IPO(PairLoss):
    per_token: ClassVar[bool] = True
    tau: float = option(
        0.1,
        "Tau: the target for the difference of log-ratios per token is 1 / (2 tau) (paper: 0.1 to 1).",
        above=0,
        changeable=True,
    )


class IPOConfig(IPO, LikelihoodConfig, PreferenceConfig, objective="ipo"):
    """Identity preference optimization (arXiv 2310.12036): the difference of log-ratios is to be 1
    / (2 tau).

    Log-ratios are means over a response's tokens, as the authors advise.
    """


class SimPO(LogisticLoss):
    """Simple preference optimization (arXiv 2405.14734): no reference, log-probs per token, a
    target margin.
    """

    anchor: ClassVar[str] = ""
    per_token: ClassVar[bool] = True
    beta: float = option(
        2.0,
        "Beta: scale of the difference of mean log-probs (paper: 2 to 2.5).",
        above=0,
        changeable=True,
    )
    gamma: float = option(
        1.0,
        "Gamma: target margin of the scaled difference, beta included (paper: 0.3 to 1.6); 0 for no margin.",
        at_least=0,
        changeable=True,
    )


class SimPOConfig(SimPO, LikelihoodConfig, PreferenceConfig, objective="simpo"): ...


class OnlineSimPOConfig(SimPO, FreshPairConfig, objective="online_simpo"): ...


class ORPO(PairLoss):
    """Odds ratio preference optimization (arXiv 2403.07691): fine-tuning and an odds ratio, without
    a reference.
    """

    anchor: ClassVar[str] = ""
    per_token: ClassVar[bool] = True
    odds_weight: float = option(
        0.1,
        "Lambda, the weight of the odds ratio; the chosen response's likelihood has weight 1 (paper: 0.1).",
        at_least=0,
        changeable=True,
    )


class ORPOConfig(ORPO, PreferenceConfig, objective="orpo"): ...


class OnlineORPOConfig(ORPO, FreshPairConfig, objective="online_orpo"): ...


class CPO(LogisticLoss):
    """Contrastive preference optimization (arXiv 2401.08417): DPO without a reference, and
    fine-tuning.
    """

    anchor: ClassVar[str] = ""
    beta: float = option(
        0.1, "Beta: scale of the difference of log-probs (paper: 0.1).", above=0, changeable=True
    )
    nll_weight: float = option(
        1.0,
        "Weight of the chosen response's negative log-likelihood, summed over tokens (paper: 1); 0 disables it.",
        at_least=0,
        changeable=True,
    )


class CPOConfig(CPO, PreferenceConfig, objective="cpo"): ...


class OnlineCPOConfig(CPO, FreshPairConfig, objective="online_cpo"): ...


class SLiC(PairLoss):
    """Sequence likelihood calibration (SLiC-HF, arXiv 2305.10425): a margin of log-probs, and
    fine-tuning.
    """

    anchor: ClassVar[str] = ""
    delta: float = option(
        1.0,
        "Delta: the margin beyond which a pair has no loss, in nats per response.",
        at_least=0,
        changeable=True,
    )
    nll_weight: float = option(
        1.0,
        "Lambda, the weight of the chosen response's negative log-likelihood; 0 disables it.",
        at_least=0,
        changeable=True,
    )


class SLiCConfig(SLiC, PreferenceConfig, objective="slic"): ...


class OnlineSLiCConfig(SLiC, FreshPairConfig, objective="online_slic"): ...


class APOZero(PairLoss):
    """APO-zero (arXiv 2408.06266): chosen likelier, rejected less. For data better than the
    policy's own.
    """

    beta: float = option(
        0.1, "Beta: scale of the log-ratios (paper: 0.1).", above=0, changeable=True
    )


class APOZeroConfig(APOZero, LikelihoodConfig, PreferenceConfig, objective="apo_zero"): ...


class OnlineAPOZeroConfig(APOZero, FreshPairConfig, objective="online_apo_zero"): ...


class APODown(APOZero):
    """APO-down (arXiv 2408.06266): both less likely, rejected more so. For data worse than the
    policy's own.
    """


class APODownConfig(APODown, LikelihoodConfig, PreferenceConfig, objective="apo_down"): ...


class OnlineAPODownConfig(APODown, FreshPairConfig, objective="online_apo_down"): ...


class DiscoPOP(PairLoss):
    """Discovered preference optimization (arXiv 2406.08414): a blend of logistic and exponential
    losses.

    With tau below (1 - ln 2) / 3 = 0.102 it starts against its labels: at a log-ratio of 0 the
    gradient favors the rejected response. The paper's formula has this bump at its tau of 0.05:
    watch accuracy, and raise tau to 0.11 if it falls.
    """

    beta: float = option(
        0.05, "Beta: scale of the difference of log-ratios (paper: 0.05).", above=0, changeable=True
    )
    tau: float = option(
        0.05,
        "Tau: width of the blend between the two losses (paper: 0.05). From 0.11 on, the loss always favors the "
        "chosen response.",
        above=0,
        changeable=True,
    )


class DiscoPOPConfig(DiscoPOP, LikelihoodConfig, PreferenceConfig, objective="discopop"): ...


class OnlineDiscoPOPConfig(DiscoPOP, FreshPairConfig, objective="online_discopop"): ...


# --- single responses, offline --------------------------------------------------------------------


class KTOConfig(PreferenceConfig, objective="kto"):
    """Kahneman-Tversky optimization (arXiv 2402.01306): single responses, each desirable or not.

    z0, the reference point, is the mean of log π/π_ref over a batch's prompts, each with the
    response to another.
    """

    beta: float = option(
        0.1,
        "Beta: how fast utility saturates away from the reference point (paper: 0.1).",
        above=0,
        changeable=True,
    )
    desirable_weight: float = option(
        1.0,
        "Weight of desirable responses. The paper keeps weight × number of desirable responses at 1 to 4/3 times "
        "that of undesirable ones.",
        above=0,
        changeable=True,
    )
    undesirable_weight: float = option(
        1.0, "Weight of undesirable responses; see --desirable_weight.", above=0, changeable=True
    )


# --- online alone ---------------------------------------------------------------------------------


class OnlineDPOConfig(FreshPairConfig, objective="online_dpo"):
    """Online DPO (arXiv 2402.04792): of two fresh responses the one with the higher reward is the
    chosen one.
    """

    kl_coef: float = option(
        1.0, "DPO's beta, the weight of the KL to the reference.", above=0, changeable=True
    )


class BPOConfig(FreshPairConfig, objective="bpo"):
    """BPO (arXiv 2406.12168): online DPO against the policy that sampled; --reference is for the
    reported KL alone.
    """

    anchor: ClassVar[str] = "old"
    compares_with_old: ClassVar[bool] = True
    kl_coef: float = option(
        0.1, "Beta, the weight of the KL to the policy that sampled.", above=0, changeable=True
    )


class OnlineIPOConfig(IPO, MixtureConfig, FreshPairConfig, objective="online_ipo"):
    """Online IPO (arXiv 2403.08635): a distance of 1 / (2 tau) between log-ratios; IPO-MD with
    --mixture.
    """

    @property
    def from_mixture(self) -> int:
        return self.responses_per_prompt if self.mixture else 0


class NashMDConfig(MixtureConfig, OnlineConfig, objective="nash_md"):
    """Nash-MD (arXiv 2312.00886): towards what is preferred to responses of a mixture with the
    reference.
    """

    objective_class: ClassVar[str] = "preferences:NashMD"
    compares_with_old: ClassVar[bool] = False
    mixture: float = option(
        0.125,
        "Beta: the reference's share in the mixture pi^(1 - beta) pi_ref^beta.",
        above=0,
        at_most=1,
    )
    tau: float = option(
        0.1,
        "Tau, the weight of the KL to the reference; 0 disables the penalty.",
        at_least=0,
        changeable=True,
    )
    inner_epochs: int = 1  # the loss is on-policy only in the first step

    def __post_init__(self) -> None:
        super().__post_init__()
        if (count := self.responses_per_prompt) % 2:
            raise UserError(
                f"--responses_per_prompt must be even: half are the mixture's, got {count}"
            )

    @property
    def from_mixture(self) -> int:
        return self.responses_per_prompt // 2


# The choices of `--objective` in fastp3o preference.
OFFLINE_OBJECTIVES: dict[str, type[PreferenceConfig]] = {
    "dpo": DPOConfig,
    "ipo": IPOConfig,
    "simpo": SimPOConfig,
    "orpo": ORPOConfig,
    "cpo": CPOConfig,
    "slic": SLiCConfig,
    "apo_zero": APOZeroConfig,
    "apo_down": APODownConfig,
    "discopop": DiscoPOPConfig,
    "kto": KTOConfig,
}
