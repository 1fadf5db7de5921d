"""Preferences between responses, given once (offline) or by the rewards of fresh responses (online).

DPO, IPO, SimPO, ORPO, CPO, SLiC, APO and DiscoPOP are losses of pairs, fixed or fresh; their formulas are functions of
`fastp3o_kernels.losses`. KTO learns from single fixed responses, Nash-MD from probabilities of preference.

Shapes: P prompts with K responses each. In a pair, column 0 is the chosen response and column 1 the rejected one.
"""

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from fastp3o.config import Condition, Flags, Needs, PolicyConfig, SupervisedConfig, objective_name, option, options
from fastp3o.errors import UserError
from fastp3o.objectives.base import GroupwiseObjective, LossAndMetrics, sampler_ratio_metrics, with_count
from fastp3o.objectives.config import MixtureConfig, OnlineConfig
from fastp3o.rewards.config import RewardConfig
from fastp3o.rewards.scaling import AbsoluteScaler, differences, pairs
from fastp3o_kernels import Groups, losses

# --- Offline: fixed pairs -------------------------------------------------------------------------------------------


@options
class PreferenceConfig(PolicyConfig, RewardConfig, SupervisedConfig):
    """Learning from fixed preferences; objectives add their own settings.

    offload: models that only evaluations need wait on the CPU.
    """

    anchor: ClassVar[str] = "ref"
    offload: ClassVar[bool] = True
    further_needs: ClassVar[Mapping[str, Needs]] = dict.fromkeys(
        ("sampler", "top_k", "top_p", "min_p", "rollout_batch_size", "rollout_memory"), "eval_prompts"
    ) | {
        "gold_reward": "reward",
        "reference": (
            "eval_prompts",
            Condition("objective", "an --objective with a reference", lambda config: config.needs_reference),
        ),
    }

    objective: str
    reference: str | None = option(
        None, "The reference policy; by default the starting model, as in each stage of sDPO (arXiv 2403.19270)."
    )
    reference_logprobs: str | None = option(
        None, "Folder of the reference's log-probs, for runs on the same data; by default output_dir.", changeable=True
    )
    eval_prompts: str | None = option(
        None, "Prompts to sample responses to in evaluations, for their KL to the reference and their --reward."
    )
    reward: str = option(
        "", "Reward of sampled responses in evaluations, as of the online stage.", needs="eval_prompts"
    )
    learning_rate: float = option(1e-6, "Peak learning rate of AdamW (DPO's paper: 1e-6).", above=0, changeable=True)

    @property
    def needs_reference(self) -> bool:
        """Whether the loss takes log-probs of a reference."""
        return bool(self.anchor)

    def sums(self, groups: Groups) -> LossAndMetrics:
        """The loss of P groups, summed, and its metrics. `groups` has `ref`, log π_ref [P, K], if that is needed."""
        raise NotImplementedError(f"{type(self).__name__} is not the configuration of an objective")


# --- Pairs ----------------------------------------------------------------------------------------------------------


@options
class PairLoss(Flags):
    """A loss of pairs, with its settings: the same one for fixed pairs and for fresh ones that rewards label.

    anchor: the log-probs that the policy's are compared with, `ref` or `old`; "" if the loss has none. per_token:
    log-probs are means over a response's tokens instead of sums.
    """

    anchor: ClassVar[str] = "ref"
    per_token: ClassVar[bool] = False

    def losses(self, logprobs: Tensor, anchor: Tensor) -> Tensor:
        """Losses of pairs, [n, 2] each -> [n]; column 0 is the chosen response. anchor: zeros if the loss has none."""
        raise NotImplementedError(f"{type(self).__name__} is not the configuration of an objective")

    def pair_metrics(self, groups: Groups, scores: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Further metrics of pairs, [P, M]. scores: [P, K]. labels: as in `sums`."""
        return {}

    def sums(self, groups: Groups, sampler_ratio_cap: float = 0.0) -> LossAndMetrics:
        """The mean of the loss over all M pairs of each prompt's responses, summed over P prompts, and its metrics.

        The response with the higher reward is chosen; pairs with equal rewards have no label, and count as zero. A
        response's score is the difference of log-probs to the anchor, or log π without one; in nats per response, or
        per token.

        accuracy: share of pairs that the policy orders as the rewards do, a half if either is undecided. margin: the
        difference of scores, chosen less rejected.
        """
        logprobs = groups.means(groups.token_logprobs) if self.per_token else groups.logprobs
        anchor = groups[self.anchor] if self.anchor else torch.zeros_like(logprobs)
        if self.per_token:
            anchor = anchor / groups.lengths.clamp(min=1)
        labels, loss_mask = differences(groups["rewards"]).sign(), pairs(groups["loss_mask"]).all(-1)
        # The chosen response comes first: a label is −1 if it is the second one.
        compared, second = [pairs(values) for values in (logprobs, anchor)], labels.unsqueeze(-1) < 0
        values = self.losses(*(pair.flip(-1).where(second, pair).flatten(0, 1) for pair in compared))
        values = values.view_as(labels)
        scores = logprobs.detach() - anchor
        margins = labels * differences(scores)
        metrics = {"accuracy": (1 + margins.sign()) / 2, "margin": margins, **self.pair_metrics(groups, scores, labels)}
        if sampler_ratio_cap:
            log_ratios = pairs(groups.sums(groups["sampler_log_ratios"])).sum(-1)
            ratios = losses.truncated_ratios(log_ratios, sampler_ratio_cap)
            values = values * ratios
            metrics |= sampler_ratio_metrics(ratios, sampler_ratio_cap)
        total = values.where(loss_mask & (labels != 0), 0.0).mean(1).sum()
        sums = {name: values.where(loss_mask, 0.0).sum() for name, values in metrics.items()}
        return total, with_count(sums, loss_mask.sum())


@options
class PairConfig(PairLoss, PreferenceConfig):
    """Learning from fixed pairs, whose chosen response has a reward of 1 and whose rejected one has 0."""

    def pair_metrics(self, groups: Groups, scores: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """log_ratio_chosen, log_ratio_rejected (without a reference logprob_...): the scores. k2: see `square_kl`."""
        kind = "log_ratio" if self.needs_reference else "logprob"
        metrics = {f"{kind}_chosen": scores[:, :1], f"{kind}_rejected": scores[:, 1:]}
        return metrics | ({"k2": square_kl(groups)[:, None]} if self.needs_reference else {})


@options
class PairWithSFTConfig(PairConfig):
    """Learning from fixed pairs by a loss that has no likelihood of its own."""

    sft_coef: float = option(
        0.0, "Weight of the chosen response's NLL per token (RPO, arXiv 2404.19733: 1).", at_least=0, changeable=True
    )

    def sums(self, groups: Groups, sampler_ratio_cap: float = 0.0) -> LossAndMetrics:
        """sft_loss: the mean negative log-likelihood of the chosen response's tokens, if it has a weight."""
        total, metrics = super().sums(groups, sampler_ratio_cap)
        if not self.sft_coef:
            return total, metrics
        sft_loss = -groups.means(groups.token_logprobs)[:, 0].sum()
        return total + self.sft_coef * sft_loss, metrics | with_count({"sft_loss": sft_loss}, len(groups.lengths))


@options
class FreshPairConfig(PairLoss, OnlineConfig):
    """Learning from fresh pairs that rewards label."""

    compares_with_old: ClassVar[bool] = False
    assumes_own_samples: ClassVar[bool] = False

    def build(self) -> "FreshPairs":
        return FreshPairs(self)

    def pair_metrics(self, groups: Groups, scores: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """tied: share of pairs with equal rewards."""
        return {"tied": (labels == 0).float()}


class FreshPairs(GroupwiseObjective):
    """A loss of all pairs of each prompt's fresh responses."""

    def __init__(self, config: FreshPairConfig):
        self.config, self.sampler_ratio_cap = config, config.sampler_ratio_cap
        # Only the order of the rewards matters.
        self.scaler = AbsoluteScaler(0.0, scale=False)

    def sums(self, groups: Groups) -> LossAndMetrics:
        return self.config.sums(groups, self.sampler_ratio_cap)


def square_kl(groups: Groups) -> Tensor:
    """Mean over each group's responses of (log π/π_ref)² / 2, [P].

    It is about the KL to the reference, in nats per response, if the policy is near it and responses are as its own.
    """
    return losses.k2(groups.logprobs, groups["ref"]).mean(1)


@options
class LogisticLoss(PairLoss):
    label_smoothing: float = option(
        0.0, "How likely a label is wrong (conservative DPO, Mitchell 2023).", at_least=0, below=0.5, changeable=True
    )


@options
class DPOConfig(LogisticLoss, PairWithSFTConfig):
    """Direct preference optimization (arXiv 2305.18290): logistic loss of the difference of log-ratios."""

    objective: str = objective_name("dpo")
    beta: float = option(
        0.1, "Beta: a larger one stays closer to the reference (paper: 0.1; 0.5 on TL;DR).", above=0, changeable=True
    )

    def losses(self, logprobs: Tensor, anchor: Tensor) -> Tensor:
        return losses.dpo(logprobs, anchor, beta=self.beta, label_smoothing=self.label_smoothing)


@options
class IPO(PairLoss):
    per_token: ClassVar[bool] = True
    tau: float = option(
        0.1, "Tau: log-ratios per token are to differ by 1 / (2 tau) (paper: 0.1 to 1).", above=0, changeable=True
    )

    def losses(self, logprobs: Tensor, anchor: Tensor) -> Tensor:
        return losses.ipo(logprobs, anchor, tau=self.tau)


@options
class IPOConfig(IPO, PairWithSFTConfig):
    """Identity preference optimization (arXiv 2310.12036): the difference of log-ratios is to be 1 / (2 tau).

    Log-ratios are means over a response's tokens, as the authors advise.
    """

    objective: str = objective_name("ipo")


@options
class SimPO(LogisticLoss):
    """Simple preference optimization (arXiv 2405.14734): no reference, log-probs per token, a target margin."""

    anchor: ClassVar[str] = ""
    per_token: ClassVar[bool] = True
    beta: float = option(2.0, "Beta: scale of mean log-probs' difference (paper: 2 to 2.5).", above=0, changeable=True)
    gamma: float = option(1.0, "Gamma: target margin, beta included (paper: 0.3 to 1.6).", at_least=0, changeable=True)

    def losses(self, logprobs: Tensor, anchor: Tensor) -> Tensor:
        return losses.simpo(logprobs, beta=self.beta, gamma=self.gamma, label_smoothing=self.label_smoothing)


@options
class SimPOConfig(SimPO, PairWithSFTConfig):
    objective: str = objective_name("simpo")


@options
class OnlineSimPOConfig(SimPO, FreshPairConfig):
    objective: str = objective_name("online_simpo")


@options
class ORPO(PairLoss):
    """Odds ratio preference optimization (arXiv 2403.07691): fine-tuning and an odds ratio, without a reference."""

    anchor: ClassVar[str] = ""
    per_token: ClassVar[bool] = True
    odds_weight: float = option(
        0.1, "Lambda, the odds ratio's weight; the chosen's likelihood has 1 (paper: 0.1).", at_least=0, changeable=True
    )

    def losses(self, logprobs: Tensor, anchor: Tensor) -> Tensor:
        return losses.orpo(logprobs, weight=self.odds_weight)


@options
class ORPOConfig(ORPO, PairConfig):
    objective: str = objective_name("orpo")


@options
class OnlineORPOConfig(ORPO, FreshPairConfig):
    objective: str = objective_name("online_orpo")


@options
class CPO(LogisticLoss):
    """Contrastive preference optimization (arXiv 2401.08417): DPO without a reference, and fine-tuning."""

    anchor: ClassVar[str] = ""
    beta: float = option(0.1, "Beta: scale of the difference of log-probs (paper: 0.1).", above=0, changeable=True)
    nll_weight: float = option(1.0, "Weight of the chosen response's NLL (paper: 1).", at_least=0, changeable=True)

    def losses(self, logprobs: Tensor, anchor: Tensor) -> Tensor:
        return losses.cpo(logprobs, beta=self.beta, weight=self.nll_weight, label_smoothing=self.label_smoothing)


@options
class CPOConfig(CPO, PairConfig):
    objective: str = objective_name("cpo")


@options
class OnlineCPOConfig(CPO, FreshPairConfig):
    objective: str = objective_name("online_cpo")


@options
class SLiC(PairLoss):
    """Sequence likelihood calibration (SLiC-HF, arXiv 2305.10425): a margin of log-probs, and fine-tuning."""

    anchor: ClassVar[str] = ""
    delta: float = option(1.0, "Delta: the margin that is enough, in nats per response.", at_least=0, changeable=True)
    nll_weight: float = option(1.0, "Lambda, the weight of the chosen response's NLL.", at_least=0, changeable=True)

    def losses(self, logprobs: Tensor, anchor: Tensor) -> Tensor:
        return losses.slic(logprobs, delta=self.delta, weight=self.nll_weight)


@options
class SLiCConfig(SLiC, PairConfig):
    objective: str = objective_name("slic")


@options
class OnlineSLiCConfig(SLiC, FreshPairConfig):
    objective: str = objective_name("online_slic")


@options
class APOZero(PairLoss):
    """APO-zero (arXiv 2408.06266): chosen likelier, rejected less. For data better than the policy's own."""

    beta: float = option(0.1, "Beta: scale of the log-ratios (paper: 0.1).", above=0, changeable=True)

    def losses(self, logprobs: Tensor, anchor: Tensor) -> Tensor:
        return losses.apo_zero(logprobs, anchor, beta=self.beta)


@options
class APOZeroConfig(APOZero, PairWithSFTConfig):
    objective: str = objective_name("apo_zero")


@options
class OnlineAPOZeroConfig(APOZero, FreshPairConfig):
    objective: str = objective_name("online_apo_zero")


@options
class APODown(APOZero):
    """APO-down (arXiv 2408.06266): both less likely, rejected more so. For data worse than the policy's own."""

    def losses(self, logprobs: Tensor, anchor: Tensor) -> Tensor:
        return losses.apo_down(logprobs, anchor, beta=self.beta)


@options
class APODownConfig(APODown, PairWithSFTConfig):
    objective: str = objective_name("apo_down")


@options
class OnlineAPODownConfig(APODown, FreshPairConfig):
    objective: str = objective_name("online_apo_down")


@options
class DiscoPOP(PairLoss):
    """Discovered preference optimization (arXiv 2406.08414): a blend of logistic and exponential losses.

    With tau below (1 - ln 2) / 3 = 0.102 it starts against its labels: at a log-ratio of 0 the gradient favours
    the rejected response. The paper's formula has this bump at its tau of 0.05: watch accuracy, and
    raise tau to 0.11 if it falls.
    """

    beta: float = option(0.05, "Beta: scale of the difference of log-ratios (paper: 0.05).", above=0, changeable=True)
    tau: float = option(
        0.05, "Tau: the blend's width (paper: 0.05). From 0.11 on, steps favour the chosen.", above=0, changeable=True
    )

    def losses(self, logprobs: Tensor, anchor: Tensor) -> Tensor:
        return losses.discopop(logprobs, anchor, beta=self.beta, tau=self.tau)


@options
class DiscoPOPConfig(DiscoPOP, PairWithSFTConfig):
    objective: str = objective_name("discopop")


@options
class OnlineDiscoPOPConfig(DiscoPOP, FreshPairConfig):
    objective: str = objective_name("online_discopop")


# --- Offline: fixed single responses --------------------------------------------------------------------------------


@options
class KTOConfig(PreferenceConfig):
    """Kahneman-Tversky optimization (arXiv 2402.01306): single responses, each desirable or not.

    z0, the reference point, is the mean of log π/π_ref over a batch's prompts, each with the response to another.
    """

    objective: str = objective_name("kto")
    beta: float = option(
        0.1, "Beta: how fast utility saturates away from the reference point (paper: 0.1).", above=0, changeable=True
    )
    desirable_weight: float = option(
        1.0, "Weight of desirable responses (paper: 1 to 4/3 times the others', by number).", above=0, changeable=True
    )
    undesirable_weight: float = option(1.0, "Weight of undesirable responses.", above=0, changeable=True)

    def sums(self, groups: Groups) -> LossAndMetrics:
        """`groups` has `desirable`, bool, `reference_point`, z0, and `share`, that of a response's kind in the batch,
        [P, 1] each. Metrics, in nats per response:

        accuracy: 1 if log π/π_ref is on the right side of z0, a half if it is z0. log_ratio_desirable,
        log_ratio_undesirable: means of log π/π_ref over the responses of a kind; 0 if a batch has none. margin: their
        difference. desirable: the share of that kind. reference_point: z0. k2: see `square_kl`.
        """
        desirable, reference_point = groups["desirable"], groups["reference_point"]
        values = losses.kto(
            groups.logprobs,
            groups["ref"],
            desirable,
            reference_point,
            beta=self.beta,
            desirable_weight=self.desirable_weight,
            undesirable_weight=self.undesirable_weight,
        )
        log_ratios = groups.logprobs - groups["ref"]
        sides = (log_ratios - reference_point).sign()
        means = log_ratios / groups["share"]
        mean_desirable, mean_undesirable = ((means * kind).sum() for kind in (desirable, ~desirable))
        metrics = {
            "accuracy": ((sides.where(desirable, -sides) + 1) / 2).sum(),
            "margin": mean_desirable - mean_undesirable,
            "log_ratio_desirable": mean_desirable,
            "log_ratio_undesirable": mean_undesirable,
            "desirable": desirable.float().sum(),
            "reference_point": reference_point.sum(),
            "k2": square_kl(groups).sum(),
        }
        return values.sum(), with_count(metrics, len(values))


# --- Fresh pairs with settings of their own --------------------------------------------------------------------------


@options
class OnlineDPOConfig(FreshPairConfig):
    """Online DPO (arXiv 2402.04792): of two fresh responses the one with the higher reward is the chosen one."""

    objective: str = objective_name("online_dpo")
    kl_coef: float = option(0.1, "DPO's beta, the weight of the KL to the reference.", above=0, changeable=True)

    def losses(self, logprobs: Tensor, anchor: Tensor) -> Tensor:
        return losses.dpo(logprobs, anchor, beta=self.kl_coef)


@options
class BPOConfig(OnlineDPOConfig):
    """BPO (arXiv 2406.12168): online DPO against the policy that sampled, another one in every update; evaluations keep
    the reference.
    """

    anchor: ClassVar[str] = "old"
    compares_with_old: ClassVar[bool] = True
    objective: str = objective_name("bpo")
    kl_coef: float = option(0.1, "Beta, the weight of the KL to the policy that sampled.", above=0, changeable=True)


@options
class OnlineIPOConfig(IPO, FreshPairConfig, MixtureConfig):
    """Online IPO (arXiv 2403.08635): a distance of 1 / (2 tau) between log-ratios; IPO-MD with --mixture."""

    objective: str = objective_name("online_ipo")

    @property
    def from_mixture(self) -> int:
        return self.responses_per_prompt if self.mixture else 0


# --- Online: probabilities of preference ----------------------------------------------------------------------------


@options
class NashMDConfig(MixtureConfig):
    """Nash-MD (arXiv 2312.00886): towards what is preferred to responses of a mixture with the reference."""

    compares_with_old: ClassVar[bool] = False
    objective: str = objective_name("nash_md")
    mixture: float = option(0.125, "Beta: the reference's share in pi^(1 - beta) pi_ref^beta.", above=0, at_most=1)
    tau: float = option(0.1, "Weight of the KL to the reference.", at_least=0, changeable=True)
    inner_epochs: int = 1  # the loss is on-policy only in the first step

    def __post_init__(self) -> None:
        super().__post_init__()
        if (count := self.responses_per_prompt) % 2:
            raise UserError(f"--responses_per_prompt must be even: half are the mixture's, got {count}")

    @property
    def from_mixture(self) -> int:
        return self.responses_per_prompt // 2

    def build(self) -> "NashMD":
        return NashMD(self)


class NashMD(GroupwiseObjective):
    """−(P(y ≻ y′) − ½ − τ log π/π_ref(y)) log π(y), the mean over a prompt's y, P the mean over its y′.

    A prompt's first K / 2 responses, y, are the policy's, and learn. The others, y′, are the mixture's. P(y ≻ y′) is
    σ(r(y) − r(y′)), as in the Bradley–Terry model of a reward model's scores.
    """

    def __init__(self, config: NashMDConfig):
        self.config = config
        self.scaler = AbsoluteScaler(0.0, scale=False)

    def sums(self, groups: Groups) -> LossAndMetrics:
        count, rewards = self.config.from_mixture, groups["rewards"]
        loss_mask = groups["loss_mask"][:, :count]
        preferred = (rewards[:, :count, None] - rewards[:, None, count:]).sigmoid().mean(2)
        values = losses.nash_md(groups.logprobs[:, :count], groups["ref"][:, :count], preferred, tau=self.config.tau)
        sums = {"preferred": preferred.where(loss_mask, 0.0).sum()}
        return values.where(loss_mask, 0.0).mean(1).sum(), with_count(sums, loss_mask.sum())


# The choices of `--objective` in scripts/preference.py.
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
