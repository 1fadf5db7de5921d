"""Fused losses for Pairwise Proximal Policy Optimization (P3O, arXiv 2310.00212). Needs torch and triton alone."""

from fastp3o_kernels.head.linear_logprobs import linear_logprobs
from fastp3o_kernels.p3o.linear_p3o_loss import linear_p3o_loss
from fastp3o_kernels.p3o.logits_p3o_loss import logits_p3o_loss
from fastp3o_kernels.p3o.objective import P3OLossOutput
from fastp3o_kernels.p3o.pair_kernel import p3o_loss, sequence_logprobs, token_p3o_loss
from fastp3o_kernels.rows.token_logprobs import token_logprobs

__version__ = "0.1.0"

__all__ = [
    "P3OLossOutput",
    "linear_logprobs",
    "linear_p3o_loss",
    "logits_p3o_loss",
    "p3o_loss",
    "sequence_logprobs",
    "token_logprobs",
    "token_p3o_loss",
]
