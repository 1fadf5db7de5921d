"""What trainers watch of each token's distribution beside the label's log-probability. N tokens, V vocabulary."""

from collections.abc import Collection
from typing import NamedTuple

from torch import Tensor

from fastp3o_kernels.copies import copyable
from fastp3o_kernels.rows.eager import at_least_fp32
from fastp3o_kernels.rows.labels import NO_LABEL, gather_indices

NAMES = ("entropy", "mean_logit", "is_top")


@copyable
class TokenOutputs(NamedTuple):
    """[N] each; None where it was not asked for. A token whose label is ignored has 0, and False.

    logprobs: of the labels, in nats, differentiable.
    entropy: −Σ p log p in nats, differentiable. Tokens of probability 0 add nothing.
    mean_logit: the mean over the vocabulary, after soft cap and temperature.
    is_top: bool, whether no token is likelier than the label.
    """

    logprobs: Tensor
    entropy: Tensor | None = None
    mean_logit: Tensor | None = None
    is_top: Tensor | None = None


def check_outputs(outputs: Collection[str]) -> None:
    unknown = sorted(set(outputs) - set(NAMES))
    if isinstance(outputs, str) or unknown:
        raise ValueError(f"outputs must be among {', '.join(NAMES)}, got {outputs!r}")


def asked_for(outputs: Collection[str], logprobs: Tensor, *values: Tensor) -> TokenOutputs:
    """values: of NAMES, in their order."""
    named = dict(zip(NAMES, values, strict=True))
    return TokenOutputs(logprobs, **{name: named[name] for name in outputs})


def of_logits(logits: Tensor, labels: Tensor, ignore_index: int) -> tuple[Tensor, Tensor, Tensor]:
    """Entropies, mean logits and is_top of rows [n, V]; differentiable where the logits are."""
    ignored, indices = gather_indices(labels, ignore_index)
    logits = at_least_fp32(logits)
    if ignore_index != NO_LABEL:
        # The gradient of a row of -inf would be 0 times NaN.
        logits = logits.masked_fill(ignored.unsqueeze(1), 0.0)
    logprobs = logits.log_softmax(1)
    # 0 log 0 is 0, also for the gradient.
    terms = logprobs.exp() * logprobs.masked_fill(logprobs == float("-inf"), 0.0)
    is_top = logits.detach().gather(1, indices).squeeze(1) >= logits.detach().amax(1)
    return (
        -terms.sum(1).masked_fill(ignored, 0.0),
        logits.detach().mean(1).masked_fill(ignored, 0.0),
        is_top & ~ignored,
    )
