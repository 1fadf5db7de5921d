"""Every objective of pairs of responses, and the ways from hidden states to its gradients: ours, eager, TRL's, Liger's.

An objective is a function of `Groups` and sums over pairs; of P pairs each way divides the sum by P.
"""

from collections.abc import Callable
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
    sequence_logprobs,
    token_p3o_loss,
)

Objective = Callable[[Groups], Tensor]


class Problem(NamedTuple):
    """of_tokens: [N] each. of_responses: [P, 2] each; column 0 is the chosen response."""

    inputs: Inputs
    of_tokens: dict[str, Tensor]
    of_responses: dict[str, Tensor]

    def groups(self, token_logprobs: Tensor) -> Groups:
        """All at once."""
        cu_seqlens = self.inputs.cu_seqlens.long()
        return Groups(token_logprobs, cu_seqlens, 2, self.of_tokens | self.of_responses)


def problem_of(inputs: Inputs) -> Problem:
    """Policies that moved since the rollout, but within the clip range: every token has a gradient.

    For GRPO+ every fourth response was cut off.
    """
    device = inputs.hidden.device
    generator = torch.Generator(device).manual_seed(1)
    with torch.no_grad():
        own = linear_logprobs(inputs.hidden, inputs.weight, inputs.labels)

    def near(values: Tensor, distance: float) -> Tensor:
        return values + distance * torch.randn(values.shape, generator=generator, device=device, dtype=values.dtype)

    of_tokens = {"old tokens": near(own, 1e-3), "ref tokens": near(own, 0.1)}
    sums, rewards = inputs.sums, inputs.rewards
    old_means = sequence_logprobs(of_tokens["old tokens"], inputs.cu_seqlens).view(-1, 2) / RESPONSE_TOKENS
    known = {
        "old": near(sums, 0.02),
        "old means": old_means,
        "ref": near(sums, 1.0),
        "rewards": rewards,
        "advantages": losses.group_advantages(rewards),
        "centred": losses.group_advantages(rewards, scale=False),
        "leave one out": losses.rloo_advantages(rewards),
        "preferred": rewards.sigmoid(),
        "desirable": rewards > 0,
        "complete": torch.arange(rewards.numel(), device=device).view(-1, 2) % 4 != 3,
    }
    return Problem(inputs, of_tokens, known)


def p3o(clipping: str) -> Objective:
    settings = P3OSettings(clipping=clipping)

    def objective(groups: Groups) -> Tensor:
        pairs = groups["old"], groups["ref"], groups["rewards"], settings
        if clipping != "token":
            return p3o_loss(groups.logprobs, *pairs).loss * len(groups.lengths)
        old = groups["old tokens"]
        loss = token_p3o_loss(groups.token_logprobs, groups.cu_seqlens, *pairs, old_token_logprobs=old).loss
        return loss * len(groups.lengths)  # its mean is over tokens, of which all responses have as many

    return objective


def of_pairs(loss: Callable[..., Tensor], *known: str, **options: float) -> Objective:
    """A loss of log-probs of whole responses."""
    return lambda groups: loss(groups.logprobs, *(groups[name] for name in known), **options).sum()


def of_means(loss: Callable[..., Tensor], **options: float) -> Objective:
    return lambda groups: loss(groups.means(groups.token_logprobs), **options).sum()


def of_single_responses(loss: Callable[..., Tensor], *known: str, **options: float) -> Objective:
    return lambda groups: loss(groups.logprobs, *(groups[name] for name in known), **options).mean(1).sum()


def of_single_tokens(loss: Callable[..., Tensor], advantages: str, *known: str) -> Objective:
    """The mean over the tokens of each response, then over responses."""

    def objective(groups: Groups) -> Tensor:
        of_responses = (groups.of_tokens(groups[name]) for name in (advantages, *known))
        tokens = loss(groups.token_logprobs, groups["old tokens"], *of_responses)
        return groups.means(tokens).mean(1).sum()

    return objective


def grpo(groups: Groups) -> Tensor:
    advantages = groups.of_tokens(groups["advantages"])
    tokens = losses.grpo(groups.token_logprobs, groups["old tokens"], advantages, groups["ref tokens"])
    return groups.means(tokens).mean(1).sum()


def gspo(groups: Groups) -> Tensor:
    means = groups.means(groups.token_logprobs)
    return losses.gspo(means, groups["old means"], groups["advantages"]).mean(1).sum()


def ipo(groups: Groups) -> Tensor:
    return losses.ipo(groups.means(groups.token_logprobs), groups["ref"] / groups.lengths).sum()


OBJECTIVES: dict[str, Objective] = {
    **{f"P3O, {clipping}": p3o(clipping) for clipping in ("joint", "separate", "none", "token")},
    "PPG": of_pairs(losses.ppg, "rewards"),
    "REINFORCE": of_single_responses(losses.reinforce, "centred"),
    "RLOO": of_single_responses(losses.ppo_clip, "old", "leave one out"),
    "PPO": of_single_tokens(losses.ppo_clip, "advantages"),
    "GRPO": grpo,
    "Dr. GRPO": of_single_tokens(losses.ppo_clip, "centred"),
    "DAPO": of_single_tokens(losses.dapo, "advantages"),
    "GRPO+": of_single_tokens(losses.grpo_plus, "advantages", "complete"),
    "GSPO": gspo,
    "REBEL": of_pairs(losses.rebel, "old", "rewards"),
    "DPO": of_pairs(losses.dpo, "ref"),
    "BPO": of_pairs(losses.bpo, "old"),
    "IPO": ipo,
    "APO-zero": of_pairs(losses.apo_zero, "ref"),
    "APO-down": of_pairs(losses.apo_down, "ref"),
    "DiscoPOP": of_pairs(losses.discopop, "ref"),
    "SLiC": of_pairs(losses.slic),
    "SimPO": of_means(losses.simpo),
    "ORPO": of_means(losses.orpo),
    "CPO": of_pairs(losses.cpo, weight=1 / RESPONSE_TOKENS),
    "KTO": of_single_responses(losses.kto, "ref", "desirable", reference_point=0.1),
    "Nash-MD": of_single_responses(losses.nash_md, "ref", "preferred"),
}


def ours(problem: Problem, name: str) -> Tensor:
    inputs = problem.inputs
    given = inputs.hidden, inputs.weight, inputs.labels, inputs.cu_seqlens, OBJECTIVES[name]
    known = {"token_tensors": problem.of_tokens, "response_tensors": problem.of_responses}
    return linear_loss(*given, responses_per_group=2, **known).loss


def after(logprobs_of: Callable[[Inputs], Tensor]) -> Callable[[Problem, str], Tensor]:
    """The objective in eager PyTorch, after the log-probs of all tokens."""
    return lambda problem, name: (
        OBJECTIVES[name](problem.groups(logprobs_of(problem.inputs))) / len(problem.inputs.rewards)
    )


eager = after(lambda inputs: eager_head(inputs.hidden, inputs.labels, inputs.weight))
trl_chunked, trl_logits = after(peers.trl_logprobs), after(peers.trl_logprobs_of_logits)
# TRL's experimental trainers of CPO and ORPO make all logits.
TRL = dict.fromkeys(("DPO", "IPO", "APO-zero", "APO-down", "DiscoPOP", "SLiC", "KTO"), trl_chunked)
TRL |= dict.fromkeys(("GRPO", "Dr. GRPO", "DAPO", "GSPO", "RLOO"), trl_chunked)
TRL |= dict.fromkeys(("CPO", "SimPO", "ORPO"), trl_logits)


def liger(problem: Problem, name: str, *, compiled: bool = True) -> Tensor:
    """Liger's chunked loss of the same name, at the same settings; DPO's and KTO's without their reference, which
    Liger computes in the same call.
    """
    return LIGER[name](problem, compiled)


def liger_of_pairs(kind: str, **settings: object) -> Callable[[Problem, bool], Tensor]:
    """All chosen responses come before all rejected ones."""

    def loss_of(problem: Problem, compiled: bool) -> Tensor:
        from liger_kernel import chunked_loss

        hidden, weight, labels = peers.of_responses(problem.inputs)
        chosen_first = torch.arange(len(labels), device=labels.device).view(-1, 2).T.flatten()
        loss = getattr(chunked_loss, f"LigerFusedLinear{kind}Loss")(compiled=compiled, **settings)
        return loss(weight, hidden[chosen_first], labels[chosen_first])[0]

    return loss_of


def liger_kto(problem: Problem, compiled: bool) -> Tensor:
    from liger_kernel.chunked_loss import LigerFusedLinearKTOLoss

    hidden, weight, labels = peers.of_responses(problem.inputs)
    desirable = problem.of_responses["desirable"].flatten()
    point = torch.tensor(0.1, device=hidden.device)
    loss = LigerFusedLinearKTOLoss(compiled=compiled, use_ref_model=False)
    return loss(hidden, weight, labels, preference_labels=desirable, kl=point)[0]


def liger_grpo(problem: Problem, compiled: bool) -> Tensor:
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    hidden, weight, labels = peers.of_responses(problem.inputs)
    old, ref = (problem.of_tokens[f"{policy} tokens"].view(labels.shape) for policy in ("old", "ref"))
    advantages = problem.of_responses["advantages"].flatten()
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
WAYS = {
    "eager": dict.fromkeys(OBJECTIVES, eager),
    "TRL": TRL,
    "Liger": dict.fromkeys(LIGER, liger),
}
