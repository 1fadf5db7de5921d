"""Preferences between responses, given once (offline) or by the rewards of fresh responses
(online).

DPO, IPO, SimPO, ORPO, CPO, SLiC, APO and DiscoPOP are losses of pairs, fixed or fresh; their
formulas are functions of `fastp3o_kernels.losses`. KTO learns from single fixed responses, Nash-MD
from probabilities of preference.

Shapes: P prompts with K responses each. In a pair, column 0 is the chosen response and column 1 the
rejected one.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from fastp3o.objectives.base import (
    GroupwiseObjective,
    LossAndMetrics,
    sampler_log_ratios,
    sampler_ratio_metrics,
    with_count,
)
from fastp3o.objectives.config import preferences as configs
from fastp3o.rewards.scaling import AbsoluteScaler, differences, pairs
from fastp3o_kernels import Groups, losses


def pair_losses(config: configs.PairLoss, logprobs: Tensor, anchor: Tensor) -> Tensor:
    """Losses of pairs, [n, 2] each -> [n]; column 0 is the chosen response. anchor: zeros if the
    loss has none.
    """
    match config:
        case configs.DPOConfig(beta=beta, label_smoothing=smoothing):
            return losses.dpo(logprobs, anchor, beta=beta, label_smoothing=smoothing)
        case configs.OnlineDPOConfig(kl_coef=beta) | configs.BPOConfig(kl_coef=beta):
            return losses.dpo(logprobs, anchor, beta=beta)
        case configs.IPO(tau=tau):
            return losses.ipo(logprobs, anchor, tau=tau)
        case configs.SimPO(beta=beta, gamma=gamma, label_smoothing=smoothing):
            return losses.simpo(logprobs, beta=beta, gamma=gamma, label_smoothing=smoothing)
        case configs.ORPO(odds_weight=weight):
            return losses.orpo(logprobs, weight=weight)
        case configs.CPO(beta=beta, nll_weight=weight, label_smoothing=smoothing):
            return losses.cpo(logprobs, beta=beta, weight=weight, label_smoothing=smoothing)
        case configs.SLiC(delta=delta, nll_weight=weight):
            return losses.slic(logprobs, delta=delta, weight=weight)
        case configs.APODown(beta=beta):  # which is an APOZero, too
            return losses.apo_down(logprobs, anchor, beta=beta)
        case configs.APOZero(beta=beta):
            return losses.apo_zero(logprobs, anchor, beta=beta)
        case configs.DiscoPOP(beta=beta, tau=tau):
            return losses.discopop(logprobs, anchor, beta=beta, tau=tau)
    raise NotImplementedError(
        f"{type(config).__name__} is not the configuration of a loss of pairs"
    )


def pair_sums(
    config: configs.PairLoss,
    groups: Groups,
    further: Callable[[Tensor, Tensor], dict[str, Tensor]],
    sampler_ratio_cap: float = 0.0,
) -> LossAndMetrics:
    """The mean of the loss over all M pairs of each prompt's responses, summed over P prompts, and
    its metrics.

    The response with the higher reward is chosen, or the one that a comparison prefers; pairs with
    equal rewards have no label, and count as zero. A response's score is the difference of
    log-probs to the anchor, or log π without one; nats per response or token.

    accuracy: share of pairs that the policy orders as the rewards do, a half if either is
    undecided. margin: the difference of scores, chosen less rejected. further: metrics of pairs,
    [P, M], from scores, [P, K], and labels.
    """
    logprobs = groups.means(groups.token_logprobs) if config.per_token else groups.logprobs
    anchor = groups[config.anchor] if config.anchor else torch.zeros_like(logprobs)
    if config.per_token:
        anchor = anchor / groups.lengths.clamp(min=1)
    labels = differences(groups["rewards"]).sign()
    loss_mask = pairs(groups["loss_mask"]).all(-1)
    second_is_chosen = labels.unsqueeze(-1) < 0

    def chosen_first(values: Tensor) -> Tensor:
        """[P, K] -> [P M, 2], the chosen response of each pair and the rejected one."""
        of_pairs = pairs(values)
        return of_pairs.flip(-1).where(second_is_chosen, of_pairs).flatten(0, 1)

    values = pair_losses(config, chosen_first(logprobs), chosen_first(anchor)).view_as(labels)
    scores = logprobs.detach() - anchor
    margins = labels * differences(scores)
    metrics = {"accuracy": (1 + margins.sign()) / 2, "margin": margins, **further(scores, labels)}
    if sampler_ratio_cap:
        log_ratios = pairs(groups.sums(sampler_log_ratios(groups))).sum(-1)
        ratios = losses.truncated_ratios(log_ratios, sampler_ratio_cap)
        values = values * ratios
        metrics |= sampler_ratio_metrics(ratios, sampler_ratio_cap)
    total = values.where(loss_mask & (labels != 0), 0.0).mean(1).sum()
    sums = {name: values.where(loss_mask, 0.0).sum() for name, values in metrics.items()}
    return total, with_count(sums, loss_mask.sum())


def fixed_pair_sums(config: configs.PairLoss, groups: Groups) -> LossAndMetrics:
    """`pair_sums` of fixed pairs. `groups` has `ref`, log π_ref [P, K], if that is needed. Further
    metrics: log_ratio_chosen, log_ratio_rejected (without a reference logprob_...): the scores. k2:
    see `square_kl`. sft_loss: the mean negative log-likelihood of the chosen response's tokens, if
    it has a weight.
    """

    def scores_of_both(scores: Tensor, labels: Tensor) -> dict[str, Tensor]:
        kind = "log_ratio" if config.anchor else "logprob"
        metrics = {f"{kind}_chosen": scores[:, :1], f"{kind}_rejected": scores[:, 1:]}
        return metrics | ({"k2": square_kl(groups)[:, None]} if config.anchor else {})

    total, metrics = pair_sums(config, groups, scores_of_both)
    if not isinstance(config, configs.LikelihoodConfig) or not config.sft_coef:
        return total, metrics
    sft_loss = -groups.means(groups.token_logprobs)[:, 0].sum()
    return total + config.sft_coef * sft_loss, metrics | with_count(
        {"sft_loss": sft_loss}, len(groups.lengths)
    )


class FreshPairs(GroupwiseObjective):
    """A loss of all pairs of each prompt's fresh responses."""

    takes_pairs = True

    def __init__(self, config: configs.FreshPairConfig):
        self.config, self.sampler_ratio_cap = config, config.sampler_ratio_cap
        # Only the order of the rewards matters.
        self.scaler = AbsoluteScaler(0.0, scale=False)

    def sums(self, groups: Groups) -> LossAndMetrics:
        """`pair_sums`. tied: share of pairs with equal rewards."""
        return pair_sums(
            self.config,
            groups,
            lambda _, labels: {"tied": (labels == 0).float()},
            self.sampler_ratio_cap,
        )


def square_kl(groups: Groups) -> Tensor:
    """Mean over each group's responses of (log π/π_ref)² / 2, [P]. It is about the KL to the
    reference, in nats per response, if the policy is near it and responses are as its own.
    """
    return losses.k2(groups.logprobs, groups["ref"]).mean(1)


def kto_sums(config: configs.KTOConfig, groups: Groups) -> LossAndMetrics:
    """`groups` has `desirable`, bool, `reference_point`, z0, and `share`, that of a response's kind
    in the batch, [P, 1] each. Metrics, in nats per response:

    accuracy: 1 if log π/π_ref is on the right side of z0, a half if it is z0. log_ratio_desirable,
    log_ratio_undesirable: means of log π/π_ref over the responses of a kind; 0 if a batch has none.
    margin: their difference. desirable: the share of that kind. reference_point: z0. k2: see
    `square_kl`.
    """
    desirable, reference_point = groups["desirable"], groups["reference_point"]
    values = losses.kto(
        groups.logprobs,
        groups["ref"],
        desirable,
        reference_point,
        beta=config.beta,
        desirable_weight=config.desirable_weight,
        undesirable_weight=config.undesirable_weight,
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


class NashMD(GroupwiseObjective):
    """−(P(y ≻ y′) − ½ − τ log π/π_ref(y)) log π(y), the mean over a prompt's y, P the mean over its
    y′. A prompt's first K / 2 responses, y, are the policy's, and learn. The others, y′, are the
    mixture's. P(y ≻ y′) is that of rewards that compare: 1/2 + their weighted sum, less penalties,
    kept within 0 and 1. Of scores it is σ(r(y) − r(y′)), as in the Bradley–Terry model.
    """

    takes_pairs = True

    def __init__(self, config: configs.NashMDConfig):
        self.config = config
        self.scaler = AbsoluteScaler(0.0, scale=False)

    def sums(self, groups: Groups) -> LossAndMetrics:
        count, rewards = self.config.from_mixture, groups["rewards"]
        loss_mask = groups["loss_mask"][:, :count]
        if rewards.dim() == 3:
            preferred = (0.5 + rewards[:, :count, count:]).clamp(0, 1).mean(2)
        else:
            preferred = (rewards[:, :count, None] - rewards[:, None, count:]).sigmoid().mean(2)
        values = losses.nash_md(
            groups.logprobs[:, :count], groups["ref"][:, :count], preferred, tau=self.config.tau
        )
        sums = {"preferred": preferred.where(loss_mask, 0.0).sum()}
        return values.where(loss_mask, 0.0).mean(1).sum(), with_count(sums, loss_mask.sum())
