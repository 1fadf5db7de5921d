"""TRPO (Schulman et al. 2015, appendix C): along the surrogate's natural gradient, as far as a
bound on the KL allows.

n trained parameters of the policy, N labeled tokens of a row. Means are over a round's tokens that
count in the loss.
"""

from collections.abc import Callable, Mapping
from copy import deepcopy
from functools import partial
from itertools import chain

import torch
from torch import Tensor, nn

from fastp3o.errors import UserError
from fastp3o.objectives.base import (
    LossAndMetrics,
    Microbatch,
    Minibatches,
    SumOverProcesses,
    with_count,
)
from fastp3o.objectives.config.trpo import TrustRegionConfig
from fastp3o.objectives.ppo import ActorCritic, clipped_value_loss, sum_and_count
from fastp3o_kernels import Head, linear_distillation
from fastp3o_kernels.losses import bounded_exp

# Nats per token: the KL at which its gradients are taken for their difference. Nearer, fp32 would
# round them away.
NEAR = 1e-5
SURROGATE, KL = 0, 1


class TRPO(ActorCritic):
    """The optimizer moves the critic alone. After that the policy makes its one step of the update."""

    config: TrustRegionConfig
    step_metrics: Mapping[str, float] = {}  # of the last update

    def __init__(self, config: TrustRegionConfig):
        from fastp3o.models.sharding import number_of_processes

        super().__init__(config)
        if number_of_processes() > 1:
            raise UserError(
                "--objective trpo trains in one process, which must hold all of the policy"
            )

    @property
    def reads_old_first(self) -> bool:
        """The loss is the critic's, and computes no log-probs."""
        return True

    @property
    def adaptive_metrics(self) -> dict[str, float]:
        return {**super().adaptive_metrics, **self.step_metrics}

    def loss(
        self,
        policy: nn.Module,
        microbatch: Microbatch,
        divisor: float | Tensor,
        *,
        first: bool = False,
    ) -> LossAndMetrics:
        """The critic's, which computes no log-probs: noting them takes a pass."""
        from fastp3o.models.packed_model import labeled_logprobs

        if first and microbatch.noted_token_logprobs is not None:
            with torch.no_grad():
                microbatch.note(labeled_logprobs(policy, microbatch.row))
        values = policy.get_submodule("critic")(microbatch.row)
        (total, count) = sum_and_count(microbatch)
        terms = clipped_value_loss(values, microbatch, self.config.value_clip_range)
        sums = {name: total(term) for name, term in terms.items()}
        return self.config.value_coef * sums["value_loss"] / divisor, with_count(sums, count)

    def conclude(
        self, policy: nn.Module, minibatches: Minibatches, sum_over_processes: SumOverProcesses
    ) -> None:
        """Moves the policy, or leaves it if no step is better. Raises UserError if a gradient is
        NaN or infinite.
        """
        config = self.config
        near = Neighborhood(policy, [*chain.from_iterable(minibatches)])
        nowhere = torch.zeros_like(near.start)
        before, _, gradient = near.at(nowhere, gradient_of=SURROGATE)
        # The natural gradient F⁻¹g. A step of length s along it has a KL of s² gᵀF⁻¹g / 2.
        natural = conjugate_gradients(
            near.fisher_product, gradient, config.cg_steps, config.cg_damping
        )
        curvature = natural @ near.fisher_product(natural)
        if not curvature.isfinite():
            raise UserError("the gradient of TRPO's surrogate, or its KL's, is NaN or infinite")
        longest = natural * (2 * config.max_kl / curvature.clamp(min=1e-30)).sqrt()
        # The line search: shorter steps, until one gains and keeps the bound.
        for tried in range(config.line_search_steps):
            surrogate, kl, _ = near.at(longest * 0.8**tried)
            if surrogate > before and kl <= config.max_kl:
                break
        else:
            surrogate, kl, _ = near.at(nowhere)  # the policy stays
        line_search = {
            "surrogate_gain": surrogate - before,
            "trpo_kl": kl,
            "line_search_steps": tried + 1,
        }
        self.step_metrics = line_search | {"grad_norm": gradient.norm().item()}


class Neighborhood:
    """Policies near the one before an update, which `at` makes of it. Vectors are [n]."""

    def __init__(self, policy: nn.Module, microbatches: list[Microbatch]):
        self.policy, self.microbatches = policy, microbatches
        trained = (
            (name, parameter)
            for name, parameter in policy.named_parameters()
            if parameter.requires_grad
        )
        self.parameters = [
            parameter for name, parameter in trained if not name.startswith("critic.")
        ]
        self.start = torch.cat([parameter.detach().flatten() for parameter in self.parameters])
        self.distance = 1e-3 * self.start.norm()  # to where the KL was last found to be about NEAR
        self.tokens = sum(float(sum_and_count(microbatch)[1]) for microbatch in microbatches) or 1.0
        with torch.no_grad():
            old = [
                policy(microbatch.row, microbatch.row.labeled_at, lambda *old: old)
                for microbatch in microbatches
            ]
        self.old_hidden, self.old_head = [hidden for hidden, _ in old], deepcopy(old[0][1])

    def at(self, offset: Tensor, gradient_of: int | None = None) -> tuple[float, float, Tensor]:
        """Moves the policy to this offset from the start. Returns the means of its surrogate ρ A
        (equation 14) and of KL(π_old ‖ π) over the vocabulary (12), and the gradient of one of the
        two.
        """
        places = (self.start + offset).split([parameter.numel() for parameter in self.parameters])
        with torch.no_grad():
            for parameter, place in zip(self.parameters, places, strict=True):
                parameter.copy_(place.view_as(parameter))
        means, gradient = [0.0, 0.0], torch.zeros_like(offset)
        for microbatch, old in zip(self.microbatches, self.old_hidden, strict=True):
            with torch.set_grad_enabled(gradient_of is not None):
                logprobs, kls = self.policy(
                    microbatch.row,
                    microbatch.row.labeled_at,
                    partial(self.logprobs_kls, microbatch, old),
                )
            surrogates = (
                bounded_exp(logprobs - microbatch.old_token_logprobs)
                * microbatch.prepared["advantages"]
            )
            parts = [
                sum_and_count(microbatch)[0](values) / self.tokens for values in (surrogates, kls)
            ]
            means = [mean + part.item() for mean, part in zip(means, parts, strict=True)]
            if gradient_of is not None:
                slopes = torch.autograd.grad(
                    parts[gradient_of], self.parameters, materialize_grads=True
                )
                gradient += torch.cat([slope.flatten() for slope in slopes])
        return means[SURROGATE], means[KL], gradient

    def logprobs_kls(
        self, microbatch: Microbatch, old: Tensor, hidden: Tensor, head: Head
    ) -> tuple[Tensor, Tensor]:
        from fastp3o.models.packed_model import label_logprobs

        kls = linear_distillation(hidden, head, old, self.old_head, divergence="forward_kl")
        return label_logprobs(hidden, head, microbatch.row), kls

    def fisher_product(self, vector: Tensor) -> Tensor:
        """The KL's Hessian times a vector, by a central difference of gradients: kernels have no
        second derivatives.
        """
        unit = vector / vector.norm().clamp(min=1e-30)
        for _ in range(10):
            _, kl, _ = self.at(self.distance * unit)
            if NEAR / 4 < kl < NEAR * 4:
                break
            self.distance = self.distance * (NEAR / max(kl, NEAR / 100)) ** 0.5
        ahead, behind = (
            self.at(side * self.distance * unit, gradient_of=KL)[2] for side in (1, -1)
        )
        return (ahead - behind) * vector.norm() / (2 * self.distance)


def conjugate_gradients(
    product: Callable[[Tensor], Tensor], target: Tensor, steps: int, damping: float
) -> Tensor:
    """About the solution of (F + damping) x = target. product: F times a vector."""
    solution, rest, direction = torch.zeros_like(target), target, target
    for _ in range(steps):
        squares = rest @ rest
        if squares <= 1e-10 * (target @ target):
            break
        image = product(direction) + damping * direction
        length = squares / (direction @ image)
        solution, rest = solution + length * direction, rest - length * image
        direction = rest + (rest @ rest) / squares * direction
    return solution
