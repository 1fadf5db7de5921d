"""One batch of responses, as the losses of every level take it."""

from copy import copy
from dataclasses import replace
from itertools import accumulate

import torch
from torch import Tensor

import fastp3o_kernels as kernels
from fastp3o_kernels.rows.logprobs import STATISTICS
from tests.kernels.problems import DEVICE, random_hidden_states, random_pairs

# P3O's losses by what they take of the policy. "its own": the old log-probs are the policy's, and
# not given.
P3O_LEVELS = ["responses", "tokens", "logits", "logits, its own", "hidden", "hidden, its own"]
# Losses of hidden states and a head, which never have all logits at once.
FUSED = ["hidden", "hidden, its own", "objective", "log-probs"]
IMPLEMENTATIONS = [None, "triton", "eager"]
LENGTHS = [3, 4, 9, 2, 1, 1, 12, 20]


def changes_and_entropies(groups: kernels.Groups):
    """An objective of all that groups have: PPO's clipped ratios of tokens with an advantage of
    each response and a weight of each group, and a bonus for entropy, of clipped tokens too.
    """
    ratios = (groups.token_logprobs - groups["old tokens"]).exp()
    advantages = groups.per_token(groups["rewards"] * groups["weights"][:, None])
    losses = torch.maximum(-advantages * ratios, -advantages * ratios.clamp(0.8, 1.2))
    changes, entropies = groups.logprobs - groups["old"], groups.means(groups.entropy)
    metrics = {
        "change": changes.sum(),
        "entropy": entropies.sum(),
        "top": groups.is_top.float().sum(),
    }
    metrics |= {"mean_logit": groups.sums(groups.mean_logit).sum()}
    return groups.means(losses).sum() - 0.1 * entropies.exp().sum(), metrics


class Batch:
    """K responses to each prompt, what is known of them, and a policy."""

    def __init__(
        self, level, lengths=LENGTHS, V=50, *, K=2, dtype=torch.float32, seed=0, **options
    ):
        """options: P3O's settings, what `random_pairs` takes of what is known, and what a head has."""

        def chosen(*names):
            return {name: options.pop(name) for name in names if name in options}

        settings, known = chosen("clipping", "kl_reward", "kl_coef"), chosen("masked", "apart")
        self.level, self.K, self.settings = (
            level.removesuffix(", outputs"),
            K,
            kernels.P3OSettings(**settings),
        )
        self.own, self.outputs = (
            level.endswith("its own"),
            STATISTICS if level.endswith(", outputs") else (),
        )
        self.states = random_hidden_states(sum(lengths), V, 8, DEVICE, dtype, seed=seed, **options)
        logits = self.states.to(torch.float64).logits()
        self.pairs = random_pairs(lengths, V, DEVICE, logits=logits, K=K, seed=seed, **known)
        self.pairs.logits = self.pairs.logits.to(dtype)
        self.lengths = [1] * len(lengths) if level == "responses" else list(lengths)
        self.logprobs = (
            self.pairs.old_token_logprobs
            if level == "tokens"
            else self.pairs.ref_logprobs.flatten()
        )
        self.divisor = sum(lengths) if self.settings.clipping == "token" else len(lengths) // K

    def to(self, dtype: torch.dtype) -> "Batch":
        other = copy(self)
        other.states, other.pairs = self.states.to(dtype), self.pairs.to(dtype)
        return other

    def leaves(self, hidden=True, weight=True) -> list[Tensor]:
        """The policy's inputs, those of tokens first."""
        if self.level in FUSED:
            states = self.states.leaves(hidden, weight)
            return [
                tensor
                for tensor in (states.hidden, states.weight, states.bias)
                if tensor is not None
            ]
        if self.level.startswith("logits"):
            return [self.pairs.logits.clone().requires_grad_()]
        return [(self.logprobs.detach().nan_to_num() + 0.1).requires_grad_()]

    def policy(self, leaves: list[Tensor]):
        """Hidden states and head of these leaves."""
        return replace(self.states, **dict(zip(("hidden", "weight", "bias"), leaves, strict=False)))

    def output(self, leaves, prompts=slice(None), *, offsets=None, impl=None, **given):
        """A loss of these prompts. offsets: in the place of a list."""
        pairs, K = self.pairs, self.K
        prompts = slice(*prompts.indices(len(self.lengths) // K))
        bounds = [0, *accumulate(self.lengths)][K * prompts.start : K * prompts.stop + 1]
        tokens = slice(bounds[0], bounds[-1])
        offsets = [bound - bounds[0] for bound in bounds] if offsets is None else offsets
        known = [
            tensor[prompts] for tensor in (pairs.old_logprobs, pairs.ref_logprobs, pairs.rewards)
        ]
        own = leaves[0] if tokens == slice(0, len(leaves[0])) else leaves[0][tokens]
        labels, given = pairs.labels[tokens], given | {"impl": impl}
        if self.level in FUSED:
            policy = own, self.policy([own, *leaves[1:]]).head, labels
        else:
            given.pop("memory_budget", None)
        if self.level == "log-probs":
            given |= {"cu_seqlens": offsets, "responses_per_prompt": K, "outputs": self.outputs}
            values = kernels.linear_logprobs(*policy, **given)
            loss = values.logprobs.square().sum() + (
                0.0 if values.entropy is None else values.entropy.exp().sum()
            )
            known = {
                name: value.detach()
                for name, value in values._asdict().items()
                if value is not None
            }
            return kernels.P3OLossOutput(loss, known, {})
        if self.level == "objective":
            tensors = {
                "token_tensors": {"old tokens": pairs.old_token_logprobs[tokens]},
                "response_tensors": {
                    "old": known[0].nan_to_num(),
                    "rewards": known[2].nan_to_num(),
                },
                "group_tensors": {"weights": known[1].nan_to_num()[:, 0]},
            }
            given |= {"responses_per_group": K, "outputs": STATISTICS, **tensors}
            return kernels.P3OLossOutput(
                *kernels.linear_loss(*policy, offsets, changes_and_entropies, **given), {}
            )
        for name in ("valid_responses", "sampler_logprobs"):
            if getattr(pairs, name) is not None:
                given.setdefault(name, getattr(pairs, name)[prompts])
        if self.own:
            known[0] = None
        elif self.settings.clipping == "token":
            given["old_token_logprobs"] = pairs.old_token_logprobs[tokens]
        if self.level == "responses":
            return kernels.p3o_loss(own.view(-1, K), *known, self.settings, **given)
        if self.level == "tokens":
            return kernels.token_p3o_loss(own, offsets, *known, self.settings, **given)
        if self.level in FUSED:
            return kernels.linear_p3o_loss(*policy, offsets, *known, self.settings, **given)
        return kernels.logits_p3o_loss(own, labels, offsets, *known, self.settings, **given)

    def run(self, impl=None, incoming=1.0, **given) -> tuple:
        """The output, and the gradients of incoming times its loss."""
        leaves = self.leaves()
        output = self.output(leaves, impl=impl, **given)
        return output, list(torch.autograd.grad(incoming * output.loss, leaves))

    def sampled_by_itself(self, impl=None, **given) -> "Batch":
        """The same responses, sampled by this very policy."""
        (own, *_), pairs, other = self.leaves(), self.pairs, copy(self)
        with torch.no_grad():
            if self.level in FUSED:
                given |= {"cu_seqlens": pairs.cu_seqlens, "responses_per_prompt": self.K}
                logprobs = kernels.linear_logprobs(
                    own, self.states.head, pairs.labels, impl=impl, **given
                )
            elif self.level.startswith("logits"):
                logprobs = kernels.token_logprobs(own, pairs.labels, impl=impl)
            else:
                logprobs = own.detach()
            sums = kernels.sequence_logprobs(logprobs, pairs.cu_seqlens, impl=impl)
        other.pairs = replace(
            pairs, old_logprobs=sums.view(pairs.rewards.shape), old_token_logprobs=logprobs
        )
        return other
