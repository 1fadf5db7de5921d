"""Identity preference optimization (arXiv 2310.12036)."""

from torch import Tensor

from fastp3o_kernels.losses.dpo import preference


def ipo(logprobs: Tensor, ref_logprobs: Tensor, *, tau: float = 0.1) -> Tensor:
    """(Δ − 1 / (2 τ))², [P, 2] -> [P] (equation 17); column 0 is the chosen response.

    The paper's log-probs are sums over a response. Means over its tokens, as its authors advise and TRL takes them,
    go in the same way. IPO-MD is this loss of pairs sampled from the mixture of `nash_md.py`.
    """
    return (preference(logprobs, ref_logprobs) - 1 / (2 * tau)).square()
