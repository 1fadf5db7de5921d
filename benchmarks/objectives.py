"""Every objective of pairs of responses, and the ways from hidden states to its gradients: ours,
eager, TRL's, Liger's.

An objective is a function of `Groups` and sums over pairs; of P pairs each way divides the sum by
P.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks import peers
from benchmarks.implementations import eager_head
from benchmarks.inputs import Inputs
from benchmarks.shapes import RESPONSE_TOKENS
from fastp3o_kernels import (
    Groups,
    P3OSettings,
    linear_logprobs,
    linear_loss,
    losses,
    p3o_loss,
    token_p3o_loss,
)

Objective = Callable[[Groups], Tensor]


class Problem(NamedTuple):
    """token_tensors: [N] each. response_tensors: [P, 2] each; column 0 is the chosen response."""

    inputs: Inputs
    token_tensors: dict[str, Tensor]
    response_tensors: dict[str, Tensor]

    def groups(self, token_logprobs: Tensor) -> Groups:
        """All at once."""
        cu_seqlens = self.inputs.cu_seqlens.long()
        return Groups(token_logprobs, cu_seqlens, 2, self.token_tensors | self.response_tensors)


def make_problem(inputs: Inputs) -> Problem:
    """Policies that moved within the clip range, so that every token has a gradient; for GRPO+ a
    fourth is cut off.
    """
    device = inputs.hidden.device
    generator = torch.Generator(device).manual_seed(1)
    with torch.no_grad():
        own = linear_logprobs(inputs.hidden, inputs.weight, inputs.labels)

    def near(values: Tensor, distance: float) -> Tensor:
        return values + distance * torch.randn(
            values.shape, generator=generator, device=device, dtype=values.dtype
        )

    token_tensors = {"old tokens": near(own, 1e-3), "ref tokens": near(own, 0.1)}
    sums, rewards = inputs.sums, inputs.rewards
    known = {
        "old": near(sums, 0.02),
        "old means": token_tensors["old tokens"].view(*rewards.shape, RESPONSE_TOKENS).mean(-1),
        "ref": near(sums, 1.0),
        "rewards": rewards,
        "advantages": losses.group_advantages(rewards),
        "centred": losses.group_advantages(rewards, scale=False),
        "leave one out": losses.rloo_advantages(rewards),
        "preferred": rewards.sigmoid(),
        "desirable": rewards > 0,
        "complete": torch.arange(rewards.numel(), device=device).view(-1, 2) % 4 != 3,
    }
    return Problem(inputs, token_tensors, known)


def p3o(settings: P3OSettings) -> Objective:
    def objective(groups: Groups) -> Tensor:
        pairs = groups["old"], groups["ref"], groups["rewards"], settings
        if settings.clipping != "token":
            return p3o_loss(groups.logprobs, *pairs).loss * len(groups.lengths)
        old = groups["old tokens"]
        loss = token_p3o_loss(
            groups.token_logprobs, groups.cu_seqlens, *pairs, old_token_logprobs=old
        ).loss
        # its mean is over tokens, of which all responses have as many
        return loss * len(groups.lengths)

    return objective


def pair_objective(loss: Callable[..., Tensor], *known: str, **options: float) -> Objective:
    """A loss of log-probs of whole responses."""
    return lambda groups: loss(groups.logprobs, *(groups[name] for name in known), **options).sum()


def mean_objective(loss: Callable[..., Tensor], **options: float) -> Objective:
    return lambda groups: loss(groups.means(groups.token_logprobs), **options).sum()


def response_objective(loss: Callable[..., Tensor], *known: str, **options: float) -> Objective:
    return lambda groups: (
        loss(groups.logprobs, *(groups[name] for name in known), **options).mean(1).sum()
    )


def token_objective(loss: Callable[..., Tensor], advantages: str, *known: str) -> Objective:
    """The mean over the tokens of each response, then over responses."""

    def objective(groups: Groups) -> Tensor:
        response_values = (groups.per_token(groups[name]) for name in (advantages, *known))
        tokens = loss(groups.token_logprobs, groups["old tokens"], *response_values)
        return groups.means(tokens).mean(1).sum()

    return objective


def grpo(groups: Groups) -> Tensor:
    advantages = groups.per_token(groups["advantages"])
    tokens = losses.ppo_clip(groups.token_logprobs, groups["old tokens"], advantages)
    tokens = tokens + 0.04 * losses.k3(groups.token_logprobs, groups["ref tokens"])
    return groups.means(tokens).mean(1).sum()


def ppg(logprobs: Tensor, rewards: Tensor) -> Tensor:
    return losses.reinforce(logprobs, rewards - rewards.mean(1, keepdim=True)).sum(1) / (
        rewards.shape[1] - 1
    )


def grpo_plus(logprobs: Tensor, old: Tensor, advantages: Tensor, complete: Tensor) -> Tensor:
    return losses.ppo_clip(logprobs, old, advantages, clip_high=0.28).masked_fill(~complete, 0.0)


def gspo(groups: Groups) -> Tensor:
    given = groups.means(groups.token_logprobs), groups["old means"], groups["advantages"]
    return losses.ppo_clip(*given, clip_low=3e-4, clip_high=4e-4).mean(1).sum()


def ipo(groups: Groups) -> Tensor:
    return losses.ipo(groups.means(groups.token_logprobs), groups["ref"] / groups.lengths).sum()


OBJECTIVES: dict[str, Objective] = {
    "P3O, joint": p3o(P3OSettings(clipping="joint")),
    "P3O, separate": p3o(P3OSettings(clipping="separate")),
    "P3O, none": p3o(P3OSettings(clipping="none")),
    "P3O, token": p3o(P3OSettings(clipping="token")),
    "PPG": pair_objective(ppg, "rewards"),
    "REINFORCE": response_objective(losses.reinforce, "centred"),
    "RLOO": response_objective(losses.ppo_clip, "old", "leave one out"),
    "PPO": token_objective(losses.ppo_clip, "advantages"),
    "GRPO": grpo,
    "Dr. GRPO": token_objective(losses.ppo_clip, "centred"),
    "DAPO": token_objective(partial(losses.ppo_clip, clip_high=0.28), "advantages"),
    "GRPO+": token_objective(grpo_plus, "advantages", "complete"),
    "GSPO": gspo,
    "REBEL": pair_objective(losses.rebel, "old", "rewards"),
    "DPO": pair_objective(losses.dpo, "ref"),
    "BPO": pair_objective(losses.dpo, "old"),
    "IPO": ipo,
    "APO-zero": pair_objective(losses.apo_zero, "ref"),
    "APO-down": pair_objective(losses.apo_down, "ref"),
    "DiscoPOP": pair_objective(losses.discopop, "ref"),
    "SLiC": pair_objective(losses.slic),
    "SimPO": mean_objective(losses.simpo),
    "ORPO": mean_objective(losses.orpo),
    "CPO": pair_objective(losses.cpo, weight=1 / RESPONSE_TOKENS),
    "KTO": response_objective(losses.kto, "ref", "desirable", reference_point=0.1),
    "Nash-MD": response_objective(losses.nash_md, "ref", "preferred"),
}


def ours(problem: Problem, name: str) -> Tensor:
    inputs = problem.inputs
    return linear_loss(
        inputs.hidden,
        inputs.weight,
        inputs.labels,
        inputs.host_cu_seqlens,
        OBJECTIVES[name],
        responses_per_group=2,
        token_tensors=problem.token_tensors,
        response_tensors=problem.response_tensors,
    ).loss


def after(logprobs: Callable[[Inputs], Tensor]) -> Callable[[Problem, str], Tensor]:
    """The objective in eager PyTorch, after the log-probs of all tokens."""
    return lambda problem, name: (
        OBJECTIVES[name](problem.groups(logprobs(problem.inputs))) / len(problem.inputs.rewards)
    )


eager = after(lambda inputs: eager_head(inputs.hidden, inputs.labels, inputs.weight))
trl_chunked, trl_logits = after(peers.trl_logprobs), after(peers.trl_logprobs_of_logits)
# TRL's experimental trainers of CPO and ORPO make all logits.
TRL = dict.fromkeys(("DPO", "IPO", "APO-zero", "APO-down", "DiscoPOP", "SLiC", "KTO"), trl_chunked)
TRL |= dict.fromkeys(("GRPO", "Dr. GRPO", "DAPO", "GSPO", "RLOO"), trl_chunked)
TRL |= dict.fromkeys(("CPO", "SimPO", "ORPO"), trl_logits)


def liger(problem: Problem, name: str, *, compiled: bool = True) -> Tensor:
    """Liger's chunked loss of the same name and settings; DPO's and KTO's without the reference
    that it computes.
    """
    return LIGER[name](problem, compiled)


def liger_of_pairs(kind: str, **settings: object) -> Callable[[Problem, bool], Tensor]:
    """All chosen responses come before all rejected ones."""

    def compute_loss(problem: Problem, compiled: bool) -> Tensor:
        from liger_kernel import chunked_loss

        hidden, weight, labels = peers.response_rows(problem.inputs)
        chosen_first = torch.arange(len(labels), device=labels.device).view(-1, 2).T.flatten()
        loss = getattr(chunked_loss, f"LigerFusedLinear{kind}Loss")(compiled=compiled, **settings)
        return loss(weight, hidden[chosen_first], labels[chosen_first])[0]

    return compute_loss


def liger_kto(problem: Problem, compiled: bool) -> Tensor:
    from liger_kernel.chunked_loss import LigerFusedLinearKTOLoss

    hidden, weight, labels = peers.response_rows(problem.inputs)
    desirable = problem.response_tensors["desirable"].flatten()
    point = torch.tensor(0.1, device=hidden.device)
    loss = LigerFusedLinearKTOLoss(compiled=compiled, use_ref_model=False)
    return loss(hidden, weight, labels, preference_labels=desirable, kl=point)[0]


def liger_grpo(problem: Problem, compiled: bool) -> Tensor:
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    hidden, weight, labels = peers.response_rows(problem.inputs)
    old, ref = (
        problem.token_tensors[f"{policy} tokens"].view(labels.shape) for policy in ("old", "ref")
    )
    advantages = problem.response_tensors["advantages"].flatten()
    loss = LigerFusedLinearGRPOLoss(compiled=compiled, loss_type="grpo")
    known = {"ref_per_token_logps": ref, "old_per_token_logps": old}
    return loss(hidden, weight, labels, torch.ones_like(labels), advantages, **known)[0]


LIGER: dict[str, Callable[[Problem, bool], Tensor]] = {
    "DPO": liger_of_pairs("DPO", use_ref_model=False),
    "SimPO": liger_of_pairs("SimPO", beta=2.0, gamma=1.0, compute_nll_loss=False),
    "ORPO": liger_of_pairs("ORPO"),
    "CPO": liger_of_pairs("CPO"),
    "KTO": liger_kto,
    "GRPO": liger_grpo,
}
# The ways of others; what they take is (problem, name), and Liger's also whether it compiles.
WAYS: dict[str, Mapping[str, Callable[..., Tensor]]] = {
    "eager": dict.fromkeys(OBJECTIVES, eager),
    "TRL": TRL,
    "Liger": dict.fromkeys(LIGER, liger),
}
