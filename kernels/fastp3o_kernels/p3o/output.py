"""A P3O loss's output: loss, metrics and what these are means over."""

from typing import NamedTuple

from torch import Tensor

from fastp3o_kernels.operation import copyable

# How many pairs count, their responses, the prompts of these, and the cases of clipping: pairs, responses or tokens.
COUNTS = ("pairs", "responses", "prompts", "cases")
# The count that each metric is a mean over; None for a maximum.
METRICS = {
    "ratio_mean": "responses",
    "ratio_max": None,
    "clip_fraction": "cases",
    "advantage_mean_abs": "pairs",
    "zero_gradient_fraction": "prompts",
    "kl": "responses",
}
# Further metrics where pairs have importance weights.
SAMPLER_METRICS = {"sampler_ratio_mean": "pairs", "sampler_ratio_capped": "pairs"}


@copyable
class P3OLossOutput(NamedTuple):
    """A loss, its metrics, and how many things each metric is a mean over.

    loss: 0-d, differentiable.
    metrics: detached 0-d tensors, never read by the host inside an operation; means over the pairs that count, their
        responses or the tokens of these, whatever the divisor, and 0 where no pair counts:
        ratio_mean, ratio_max: of π/π_old over the responses;
        clip_fraction: share outside the clip range: of pairs (joint; also reported by none, which clips nothing), of
            responses (separate) or of tokens (token);
        advantage_mean_abs: mean |q| over pairs;
        zero_gradient_fraction: share of prompts none of whose responses' tokens has a gradient;
        kl: mean over responses of log π − log π_ref, in nats;
        sampler_ratio_mean, sampler_ratio_capped: only where sampler_logprobs were given: the mean of the pairs'
            importance weights, and the share of them that is at its cap.
    counts: by metric, but ratio_max, how many responses, pairs, prompts, tokens it is a mean over: 0-d, fp32, on the
        device. The metric of several batches is the sum of metric times count over the sum of counts.

    `copy.deepcopy` gives the values without their graph. torch.load(weights_only=True) takes what torch.save wrote,
    once fastp3o_kernels is imported; so it does with the outputs of the other operations.
    """

    loss: Tensor
    metrics: dict[str, Tensor]
    counts: dict[str, Tensor]
