"""Preferences between responses, given once (offline) or by the rewards of fresh responses (online).

DPO, IPO, SimPO, ORPO, CPO, SLiC, APO, DiscoPOP and KTO learn from given preferences. Online DPO, BPO and online IPO
have the same formulas, which are functions of `fastp3o_kernels.losses`. Nash-MD learns from preference probabilities.

Shapes: P prompts with K responses each. In a pair, column 0 is the chosen response and column 1 the rejected one.
"""

from abc import abstractmethod
from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor

from fastp3o.config import Condition, Needs, PolicyConfig, SupervisedConfig, objective_name, option, options
from fastp3o.errors import UserError
from fastp3o.objectives.base import GroupwiseObjective, LossAndMetrics, sampler_ratio_metrics
from fastp3o.objectives.config import MixtureConfig, OnlineConfig
from fastp3o.rewards.config import RewardConfig
from fastp3o.rewards.scaling import AbsoluteScaler, differences, pairs
from fastp3o_kernels import Groups, losses

# --- Offline: fixed pairs -------------------------------------------------------------------------------------------


@options
class PreferenceConfig(PolicyConfig, RewardConfig, SupervisedConfig):
    """Learning from fixed preferences; objectives add their own settings.

    needs_reference: whether the loss takes log-probs of a reference. offload: models that only evaluations need wait on
    the CPU.
    """

    needs_reference: ClassVar[bool] = True
    offload: ClassVar[bool] = True
    further_needs: ClassVar[Mapping[str, Needs]] = dict.fromkeys(
        ("sampler", "top_k", "top_p", "min_p", "rollout_batch_size", "rollout_memory", "compile_rollouts"),
        "eval_prompts",
    ) | {
        "gold_reward": "reward",
        "reference": (
            "eval_prompts",
            Condition("objective", "an --objective with a reference", lambda config: config.needs_reference),
        ),
    }

    objective: str
    reference: str | None = option(
        None,
        "The reference policy, whose log-probs of the data are computed once; by default the starting model. A stage "
        "of sDPO (arXiv 2403.19270) starts from the model of the one before.",
    )
    reference_logprobs: str | None = option(
        None,
        "Folder where the reference's log-probs are kept, and found by runs on the same data; by default output_dir.",
        changeable=True,
    )
    eval_prompts: str | None = option(
        None,
        "Prompts to sample responses to in evaluations, for their KL to the reference and their --reward, as the "
        "online stage does. --eval_split and --eval_limit are of these, too.",
    )
    reward: str = option(
        "",
        "Reward of sampled responses in evaluations: a reward model (folder or hub name), a function, as "
        "module:function, or the URL of a service that scores responses. The weighted sum of several, separated by "
        "commas.",
        needs="eval_prompts",
    )
    learning_rate: float = option(1e-6, "Peak learning rate of AdamW (DPO's paper: 1e-6).", above=0, changeable=True)

    def losses(self, groups: Groups) -> Tensor:
        """The loss of each pair or response of P groups, [P] or [P, 1]. `groups` has `reference`, log π_ref [P, K]."""
        raise NotImplementedError(f"{type(self).__name__} is not the configuration of an objective")

    def metrics(self, groups: Groups) -> dict[str, Tensor]:
        """Metrics other than the loss, summed over the groups, 0-d."""
        raise NotImplementedError(f"{type(self).__name__} is not the configuration of an objective")


@options
class PairConfig(PreferenceConfig):
    """Learning from pairs. per_token: log-probs are means over a response's tokens instead of sums."""

    per_token: ClassVar[bool] = False

    def logprobs(self, groups: Groups) -> Tensor:
        """log π of each response, [P, 2]: sums over its tokens, or means."""
        return groups.means(groups.token_logprobs) if self.per_token else groups.logprobs

    def ref_logprobs(self, groups: Groups) -> Tensor:
        """log π_ref of each response, [P, 2], likewise."""
        return groups["reference"] / groups.lengths if self.per_token else groups["reference"]

    def metrics(self, groups: Groups) -> dict[str, Tensor]:
        """The objective ranks responses by a score: log π/π_ref, or log π if it has no reference; in nats per response,
        or per token if per_token.

        accuracy: 1 if the chosen response has the higher score, a half if they are equal. margin: the difference.
        log_ratio_chosen, log_ratio_rejected (logprob_chosen, logprob_rejected): the scores. k2: see `square_kl`.
        """
        scores = self.logprobs(groups)
        if self.needs_reference:
            scores = scores - self.ref_logprobs(groups)
        margins = scores[:, 0] - scores[:, 1]
        kind = "log_ratio" if self.needs_reference else "logprob"
        metrics = {
            "accuracy": ((margins.sign() + 1) / 2).sum(),
            "margin": margins.sum(),
            f"{kind}_chosen": scores[:, 0].sum(),
            f"{kind}_rejected": scores[:, 1].sum(),
        }
        return metrics | ({"k2": square_kl(groups).sum()} if self.needs_reference else {})


def square_kl(groups: Groups) -> Tensor:
    """Mean over each group's responses of (log π/π_ref)² / 2, [P].

    It is about the KL to the reference, in nats per response, if the policy is near it and the responses are like its
    own.
    """
    return losses.k2(groups.logprobs, groups["reference"]).mean(1)


@options
class DPOConfig(PairConfig):
    """Direct preference optimization (arXiv 2305.18290): logistic loss of the difference of log-ratios."""

    objective: str = objective_name("dpo")
    beta: float = option(
        0.1, "Beta: a larger one stays closer to the reference (paper: 0.1; 0.5 on TL;DR).", above=0, changeable=True
    )
    label_smoothing: float = option(
        0.0,
        "Probability that a label is wrong (conservative DPO, Mitchell 2023).",
        at_least=0,
        below=0.5,
        changeable=True,
    )

    def losses(self, groups: Groups) -> Tensor:
        logprobs, ref_logprobs = self.logprobs(groups), self.ref_logprobs(groups)
        return losses.dpo(logprobs, ref_logprobs, beta=self.beta, label_smoothing=self.label_smoothing)


@options
class IPOConfig(PairConfig):
    """Identity preference optimization (arXiv 2310.12036): the difference of log-ratios is to be 1 / (2 tau).

    Log-ratios are means over a response's tokens, as the authors advise.
    """

    per_token: ClassVar[bool] = True
    objective: str = objective_name("ipo")
    tau: float = option(
        0.1, "Tau: log-ratios per token are to differ by 1 / (2 tau) (paper: 0.1 to 1).", above=0, changeable=True
    )

    def losses(self, groups: Groups) -> Tensor:
        return losses.ipo(self.logprobs(groups), self.ref_logprobs(groups), tau=self.tau)


@options
class SimPOConfig(PairConfig):
    """Simple preference optimization (arXiv 2405.14734): no reference, log-probs per token, a target margin."""

    needs_reference: ClassVar[bool] = False
    per_token: ClassVar[bool] = True
    objective: str = objective_name("simpo")
    beta: float = option(
        2.0, "Beta: scale of the difference of mean log-probs (paper: 2 to 2.5).", above=0, changeable=True
    )
    gamma: float = option(
        1.0, "Gamma: the target margin, beta included (paper: 0.3 to 1.6).", at_least=0, changeable=True
    )

    def losses(self, groups: Groups) -> Tensor:
        return losses.simpo(self.logprobs(groups), beta=self.beta, gamma=self.gamma)


@options
class ORPOConfig(PairConfig):
    """Odds ratio preference optimization (arXiv 2403.07691): fine-tuning and an odds ratio, without a reference."""

    needs_reference: ClassVar[bool] = False
    per_token: ClassVar[bool] = True
    objective: str = objective_name("orpo")
    odds_weight: float = option(
        0.1, "Lambda, the odds ratio's weight; the chosen's likelihood has 1 (paper: 0.1).", at_least=0, changeable=True
    )

    def losses(self, groups: Groups) -> Tensor:
        return losses.orpo(self.logprobs(groups), weight=self.odds_weight)


@options
class CPOConfig(PairConfig):
    """Contrastive preference optimization (arXiv 2401.08417): DPO without a reference, and fine-tuning."""

    needs_reference: ClassVar[bool] = False
    objective: str = objective_name("cpo")
    beta: float = option(0.1, "Beta: scale of the difference of log-probs (paper: 0.1).", above=0, changeable=True)
    nll_weight: float = option(
        1.0, "Weight of the chosen response's negative log-likelihood (paper: 1).", at_least=0, changeable=True
    )

    def losses(self, groups: Groups) -> Tensor:
        return losses.cpo(self.logprobs(groups), beta=self.beta, weight=self.nll_weight)


@options
class SLiCConfig(PairConfig):
    """Sequence likelihood calibration (SLiC-HF, arXiv 2305.10425): a margin of log-probs, and fine-tuning."""

    needs_reference: ClassVar[bool] = False
    objective: str = objective_name("slic")
    delta: float = option(
        1.0, "Delta: the margin of log-probs that is enough, in nats per response.", at_least=0, changeable=True
    )
    nll_weight: float = option(
        1.0, "Lambda, the weight of the chosen response's negative log-likelihood.", at_least=0, changeable=True
    )

    def losses(self, groups: Groups) -> Tensor:
        return losses.slic(self.logprobs(groups), delta=self.delta, weight=self.nll_weight)


@options
class APOZeroConfig(PairConfig):
    """APO-zero (arXiv 2408.06266): chosen likelier, rejected less. For data better than the policy's own."""

    objective: str = objective_name("apo_zero")
    beta: float = option(0.1, "Beta: scale of the log-ratios (paper: 0.1).", above=0, changeable=True)

    def losses(self, groups: Groups) -> Tensor:
        return losses.apo_zero(self.logprobs(groups), self.ref_logprobs(groups), beta=self.beta)


@options
class APODownConfig(PairConfig):
    """APO-down (arXiv 2408.06266): both less likely, rejected more so. For data worse than the policy's own."""

    objective: str = objective_name("apo_down")
    beta: float = option(0.1, "Beta: scale of the log-ratios (paper: 0.1).", above=0, changeable=True)

    def losses(self, groups: Groups) -> Tensor:
        return losses.apo_down(self.logprobs(groups), self.ref_logprobs(groups), beta=self.beta)


@options
class DiscoPOPConfig(PairConfig):
    """Discovered preference optimization (arXiv 2406.08414): a blend of logistic and exponential losses.

    With tau below (1 - ln 2) / 3 = 0.102 it starts against its labels: at a log-ratio of 0 the gradient favours
    the rejected response. The paper's formula has this bump at its tau of 0.05: watch accuracy, and
    raise tau to 0.11 if it falls.
    """

    objective: str = objective_name("discopop")
    beta: float = option(0.05, "Beta: scale of the difference of log-ratios (paper: 0.05).", above=0, changeable=True)
    tau: float = option(
        0.05,
        "Tau: width of the blend, in units of the scaled difference (paper: 0.05). From 0.11 on, steps favour the "
        "chosen response everywhere.",
        above=0,
        changeable=True,
    )

    def losses(self, groups: Groups) -> Tensor:
        return losses.discopop(self.logprobs(groups), self.ref_logprobs(groups), beta=self.beta, tau=self.tau)


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
        1.0,
        "Weight of desirable responses. In the paper the weight times their number is 1 to 4/3 times that of "
        "undesirable ones.",
        above=0,
        changeable=True,
    )
    undesirable_weight: float = option(1.0, "Weight of undesirable responses.", above=0, changeable=True)

    def losses(self, groups: Groups) -> Tensor:
        """`groups` has `desirable`, bool, and `reference_point`, z0, both [P, 1]."""
        return losses.kto(
            groups.logprobs,
            groups["reference"],
            groups["desirable"],
            groups["reference_point"],
            beta=self.beta,
            desirable_weight=self.desirable_weight,
            undesirable_weight=self.undesirable_weight,
        )

    def metrics(self, groups: Groups) -> dict[str, Tensor]:
        """In nats per response:

        accuracy: 1 if log π/π_ref is on the right side of z0, a half if it is z0. log_ratio_desirable,
        log_ratio_undesirable: means of log π/π_ref over the responses of a kind; 0 if a batch has none. margin: their
        difference. desirable: the share of that kind. reference_point: z0. k2: see `square_kl`.

        `groups` also has `share`, [P, 1]: the share of a response's kind in the batch.
        """
        desirable = groups["desirable"]
        log_ratios = groups.logprobs - groups["reference"]
        sides = (log_ratios - groups["reference_point"]).sign()
        means = log_ratios / groups["share"]
        mean_desirable, mean_undesirable = ((means * kind).sum() for kind in (desirable, ~desirable))
        return {
            "accuracy": ((sides.where(desirable, -sides) + 1) / 2).sum(),
            "margin": mean_desirable - mean_undesirable,
            "log_ratio_desirable": mean_desirable,
            "log_ratio_undesirable": mean_undesirable,
            "desirable": desirable.float().sum(),
            "reference_point": groups["reference_point"].sum(),
            "k2": square_kl(groups).sum(),
        }


# --- Online: pairs that rewards label -------------------------------------------------------------------------------


class LabelledPairs(GroupwiseObjective):
    """The mean of a loss over all pairs of each prompt's responses; the one with the higher reward is chosen.

    Pairs with equal rewards have no label, and count as zero. anchor: the log-probs that the policy's are compared
    with, `ref` or `old`. per_token: log-probs are means over a response's tokens instead of sums.
    """

    anchor: ClassVar[str] = "ref"
    per_token: ClassVar[bool] = False

    def __init__(self, config: OnlineConfig):
        self.config, self.sampler_ratio_cap = config, config.sampler_ratio_cap
        # Only the order of the rewards matters.
        self.scaler = AbsoluteScaler(0.0, scale=False)

    @abstractmethod
    def losses(self, logprobs: Tensor, anchor: Tensor) -> Tensor:
        """Losses of pairs, [n, 2] each -> [n]; column 0 is the chosen response."""

    def metric_count(self, counted: Tensor) -> Tensor:
        """Number of pairs."""
        return pairs(counted).all(-1).sum()

    def sums(self, groups: Groups) -> LossAndMetrics:
        """accuracy: share of pairs that the policy orders as the rewards do, a half if either is undecided. tied: share
        with equal rewards. margin: the difference of log-ratios, chosen less rejected.
        """
        logprobs, anchor = groups.logprobs, groups[self.anchor]
        if self.per_token:
            logprobs, anchor = groups.means(groups.token_logprobs), anchor / groups.lengths.clamp(min=1)
        labels = differences(groups["rewards"]).sign()
        counts = pairs(groups["counted"]).all(-1)
        values = self.losses(*(chosen_first(pairs(values), labels).flatten(0, 1) for values in (logprobs, anchor)))
        values = values.view_as(labels)
        margins = labels * differences(logprobs.detach() - anchor)
        metrics = {"accuracy": (1 + margins.sign()) / 2, "tied": (labels == 0).float(), "margin": margins}
        if self.sampler_ratio_cap:
            log_ratios = pairs(groups.sums(groups["sampler_log_ratios"])).sum(-1)
            ratios = losses.truncated_ratios(log_ratios, self.sampler_ratio_cap)
            values = values * ratios
            metrics |= sampler_ratio_metrics(ratios, self.sampler_ratio_cap)
        loss = values.where(counts & (labels != 0), 0.0).mean(1).sum()
        return loss, {name: values.where(counts, 0.0).sum() for name, values in metrics.items()}


def chosen_first(values: Tensor, labels: Tensor) -> Tensor:
    """Puts the chosen response of pairs [P, M, 2] first; labels [P, M] is −1 if it is the second one."""
    return values.flip(-1).where(labels.unsqueeze(-1) < 0, values)


@options
class OnlineDPOConfig(OnlineConfig):
    """Online DPO (arXiv 2402.04792): of two fresh responses the one with the higher reward is the chosen one."""

    compares_with_old: ClassVar[bool] = False
    assumes_own_samples: ClassVar[bool] = False
    objective: str = objective_name("online_dpo")
    kl_coef: float = option(
        0.1, "Beta of DPO's implicit reward, the weight of the KL to the reference.", above=0, changeable=True
    )

    def build(self) -> "OnlineDPO":
        return OnlineDPO(self)


class OnlineDPO(LabelledPairs):
    """DPO's loss of fresh responses (Guo et al. 2024), as in the P3O paper."""

    config: OnlineDPOConfig

    def losses(self, logprobs: Tensor, anchor: Tensor) -> Tensor:
        return losses.dpo(logprobs, anchor, beta=self.config.kl_coef)


@options
class BPOConfig(OnlineDPOConfig):
    """BPO (arXiv 2406.12168): online DPO against the policy that sampled."""

    compares_with_old: ClassVar[bool] = True
    objective: str = objective_name("bpo")
    kl_coef: float = option(0.1, "Beta, the weight of the KL to the policy that sampled.", above=0, changeable=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.reference_moves:
            raise UserError(
                "--reference_every and --reference_decay change nothing: the loss compares with the policy that sampled"
            )

    def build(self) -> "BPO":
        return BPO(self)


class BPO(OnlineDPO):
    """DPO's loss against the policy that sampled, another one in every update; evaluations keep the reference."""

    anchor = "old"


@options
class OnlineIPOConfig(MixtureConfig):
    """Online IPO (arXiv 2403.08635): a distance of 1 / (2 tau) between log-ratios; IPO-MD with --mixture."""

    compares_with_old: ClassVar[bool] = False
    assumes_own_samples: ClassVar[bool] = False
    objective: str = objective_name("online_ipo")
    tau: float = option(
        0.1, "Weight of the KL to the reference; log-ratios are means over tokens.", above=0, changeable=True
    )

    @property
    def from_mixture(self) -> int:
        return self.responses_per_prompt if self.mixture else 0

    def build(self) -> "OnlineIPO":
        return OnlineIPO(self)


class OnlineIPO(LabelledPairs):
    """IPO's loss (arXiv 2310.12036) of fresh responses, log-ratios averaged over tokens."""

    config: OnlineIPOConfig
    per_token = True

    def losses(self, logprobs: Tensor, anchor: Tensor) -> Tensor:
        return losses.ipo(logprobs, anchor, tau=self.config.tau)


# --- Online: probabilities of preference ----------------------------------------------------------------------------


@options
class NashMDConfig(MixtureConfig):
    """Nash-MD (arXiv 2312.00886): towards what is preferred to responses of a mixture with the reference."""

    compares_with_old: ClassVar[bool] = False
    objective: str = objective_name("nash_md")
    mixture: float = option(
        0.125, "Beta: the reference's share in the mixture pi^(1 - beta) pi_ref^beta.", above=0, at_most=1
    )
    tau: float = option(0.1, "Weight of the KL to the reference.", at_least=0, changeable=True)
    inner_epochs: int = option(
        1, "Passes over each round's rollouts; the loss is on-policy only in the first step.", at_least=1
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.responses_per_prompt % 2:
            raise UserError(
                f"--responses_per_prompt must be even: half are the mixture's, got {self.responses_per_prompt}"
            )

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

    def metric_count(self, counted: Tensor) -> Tensor:
        """Number of the policy's own responses."""
        return counted[:, : self.config.from_mixture].sum()

    def sums(self, groups: Groups) -> LossAndMetrics:
        count, rewards = self.config.from_mixture, groups["rewards"]
        own, counted = slice(count), groups["counted"][:, :count]
        preferred = (rewards[:, :count, None] - rewards[:, None, count:]).sigmoid().mean(2)
        values = losses.nash_md(groups.logprobs[:, own], groups["ref"][:, own], preferred, tau=self.config.tau)
        return values.where(counted, 0.0).mean(1).sum(), {"preferred": preferred.where(counted, 0.0).sum()}


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
