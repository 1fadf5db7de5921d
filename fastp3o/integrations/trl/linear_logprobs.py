"""`linear_logprobs` in the place where all of TRL's trainers compute log-probabilities.

Written against TRL 1.16, whose trainers call one function for log-probs, entropy, mean logit and top-1 of each token.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import trl.trainer.utils
from torch import Tensor

from fastp3o_kernels import Head, TokenOutputs, linear_logprobs

# What TRL's function returns, in its order, and what `linear_logprobs` calls it.
OUTPUTS = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
OURS = {"entropy": "entropy", "mean_logits": "mean_logit", "is_top1": "is_top"}
CALLED_IN: Any = trl.trainer.utils
TRLS_OWN = CALLED_IN._ChunkedLogProbFunction


class LinearLogprobsOfTRL:
    """Stands for TRL's autograd function, of which `apply` is all that is called."""

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
        """OUTPUTS of each token, [N]; None for what is not among `outputs`. log_probs always are.

        All of one pass of `linear_logprobs`, differentiable as TRL's are, but for log_sum_sq_probs, which only DPO with
        use_weighting asks for: that is TRL's own, from a second pass. Of tokens equally likely TRL's is_top1 takes the
        first alone, ours each.
        """
        # TRL scales before it caps: c tanh(s z / c) = s (c/s) tanh(z / (c/s)).
        head = Head(
            weight.to(hidden.dtype),
            bias=None if bias is None else bias.to(hidden.dtype),
            softcap=None if softcap is None else softcap / logit_scale,
            temperature=temperature / logit_scale,
        )
        wanted = [OURS[name] for name in OUTPUTS if name in OURS and name in outputs]
        found = (
            linear_logprobs(hidden, head, targets, outputs=wanted)
            if wanted
            else TokenOutputs(linear_logprobs(hidden, head, targets))
        )
        squares = None
        if "log_sum_sq_probs" in outputs:
            given = hidden, weight, bias, targets, temperature, chunk_size, softcap, logit_scale
            squares = TRLS_OWN.apply(*given, ("log_sum_sq_probs",))[2]
        return found.logprobs, found.entropy, squares, found.mean_logit, found.is_top


@contextmanager
def linear_logprobs_in_trl() -> Iterator[None]:
    """Within, TRL's DPO, GRPO, KTO and RLOO trainers take log-probs, entropy, mean logit and top-1 from
    `linear_logprobs`.

    with linear_logprobs_in_trl():
        trainer.train()
    """
    before = CALLED_IN._ChunkedLogProbFunction
    CALLED_IN._ChunkedLogProbFunction = LinearLogprobsOfTRL
    try:
        yield
    finally:
        CALLED_IN._ChunkedLogProbFunction = before
