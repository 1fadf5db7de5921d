"""`linear_logprobs` in the place where all of TRL's trainers compute log-probabilities.

Written against TRL 1.16, whose trainers call one function for log-probs, entropy, mean logit and top-1 of each token.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import trl.trainer.utils
from torch import Tensor

from fastp3o_kernels import Head, linear_logprobs

# What TRL's function returns, in its order.
OUTPUTS = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
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

        Log-probs are `linear_logprobs`'; everything else is TRL's own function's, differentiable as it is there.
        """
        # TRL scales before it caps: c tanh(s z / c) = s (c/s) tanh(z / (c/s)).
        head = Head(
            weight.to(hidden.dtype),
            bias=None if bias is None else bias.to(hidden.dtype),
            softcap=None if softcap is None else softcap / logit_scale,
            temperature=temperature / logit_scale,
        )
        logprobs = linear_logprobs(hidden, head, targets)
        if not set(outputs) & set(OUTPUTS[1:]):
            return logprobs, None, None, None, None
        given = hidden, weight, bias, targets, temperature, chunk_size, softcap, logit_scale, outputs
        return logprobs, *TRLS_OWN.apply(*given)[1:]


@contextmanager
def linear_logprobs_in_trl() -> Iterator[None]:
    """Within, TRL's DPO, GRPO, KTO and RLOO trainers take log-probs from `linear_logprobs`.

    with linear_logprobs_in_trl():
        trainer.train()
    """
    before = CALLED_IN._ChunkedLogProbFunction
    CALLED_IN._ChunkedLogProbFunction = LinearLogprobsOfTRL
    try:
        yield
    finally:
        CALLED_IN._ChunkedLogProbFunction = before
