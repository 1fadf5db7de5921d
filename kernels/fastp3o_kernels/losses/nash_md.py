"""Nash learning from human feedback by mirror descent (Nash-MD, arXiv 2312.00886)."""

from torch import Tensor


def nash_md(logprobs: Tensor, ref_logprobs: Tensor, preferred: Tensor, *, tau: float = 0.1) -> Tensor:
    """−(P(y ≻ y′) − ½ − τ log π/π_ref(y)) log π(y) of each response y, any shape; the bracket is detached (section 7).

    preferred: P(y ≻ y′), the probability that y is preferred to y′, which is sampled from the geometric mixture
    π^(1 − β) π_ref^β of policy and reference. ½ is the baseline.
    """
    advantages = preferred - 0.5 - tau * (logprobs - ref_logprobs)
    return -advantages.detach() * logprobs
