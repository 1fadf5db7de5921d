"""`linear_logprobs` in place of the function that all of TRL's trainers compute log-probabilities
with.

TRL 1.15 and 1.16. That function returns log-prob, entropy, mean logit and top-1 of each token.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import trl.trainer.utils
from torch import Tensor

from fastp3o_kernels import Head, linear_logprobs

# The outputs of TRL's function, in its order, and their names in `linear_logprobs`.
OUTPUTS = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
OURS = {"entropy": "entropy", "mean_logits": "mean_logit", "is_top1": "is_top"}
CALLED_IN: Any = trl.trainer.utils
TRLS_OWN = CALLED_IN._ChunkedLogProbFunction


class LinearLogprobsOfTRL:
    """Replaces TRL's autograd function, of which TRL only calls `apply`."""

    @staticmethod
    def apply(
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        chunk_size: int,
        softcap: float | None,
        logit_scale: float,
        outputs: tuple[str, ...],
    ) -> tuple[Tensor | None, ...]:
        """OUTPUTS of each token, [N]; None for those that are not in `outputs`, except log_probs.

        All come from one pass of `linear_logprobs` and are differentiable as TRL's are. The
        exception is log_sum_sq_probs, which only DPO with use_weighting asks for: it is TRL's own,
        from a second pass. If several tokens are equally likely, is_top1 is true for each of them;
        TRL's is true only for the first.
        """
        # TRL scales before it caps: c tanh(s z / c) = s (c/s) tanh(z / (c/s)).
        head = Head(
            weight.to(hidden.dtype),
            bias=None if bias is None else bias.to(hidden.dtype),
            softcap=None if softcap is None else softcap / logit_scale,
            temperature=temperature / logit_scale,
        )
        wanted = [OURS[name] for name in OUTPUTS if name in OURS and name in outputs]
        values = linear_logprobs(hidden, head, targets, outputs=wanted)
        squares = None
        if "log_sum_sq_probs" in outputs:
            arguments = hidden, weight, bias, targets, temperature, chunk_size, softcap, logit_scale
            squares = TRLS_OWN.apply(*arguments, ("log_sum_sq_probs",))[2]
        return values.logprobs, values.entropy, squares, values.mean_logit, values.is_top


@contextmanager
def linear_logprobs_in_trl() -> Iterator[None]:
    """A context in which TRL's DPO, GRPO, KTO and RLOO trainers take log-probs, entropy, mean logit
    and top-1 from `linear_logprobs`.

    with linear_logprobs_in_trl():
        trainer.train()
    """
    before = CALLED_IN._ChunkedLogProbFunction
    CALLED_IN._ChunkedLogProbFunction = LinearLogprobsOfTRL
    try:
        yield
    finally:
        CALLED_IN._ChunkedLogProbFunction = before
