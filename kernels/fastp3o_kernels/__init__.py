"""Fused losses for Pairwise Proximal Policy Optimization (P3O, arXiv 2310.00212).

Needs only torch. With triton installed, tensors on a GPU go through fused kernels; without it,
through PyTorch. torch.compile calls them with a graph break; leave them outside of fullgraph=True,
torch.export and fake tensors.
"""

from fastp3o_kernels import losses
from fastp3o_kernels.exposed_head import expose_head
from fastp3o_kernels.head.head import Head
from fastp3o_kernels.head.linear_distillation import linear_distillation
from fastp3o_kernels.head.linear_logprobs import linear_logprobs
from fastp3o_kernels.head.linear_loss import Groups, LinearLossOutput, linear_loss
from fastp3o_kernels.head.vocabulary_shard import VocabularyShard
from fastp3o_kernels.p3o.linear_p3o_loss import linear_p3o_loss
from fastp3o_kernels.p3o.losses import logits_p3o_loss, p3o_loss, token_p3o_loss
from fastp3o_kernels.p3o.settings import P3OLossOutput, P3OSettings
from fastp3o_kernels.response_tokens import ResponseTokens, response_tokens
from fastp3o_kernels.rows.logprobs import TokenOutputs, sequence_logprobs, token_logprobs

__version__ = "0.1.0"

__all__ = [
    "Groups",
    "Head",
    "LinearLossOutput",
    "P3OLossOutput",
    "P3OSettings",
    "ResponseTokens",
    "TokenOutputs",
    "VocabularyShard",
    "expose_head",
    "linear_distillation",
    "linear_logprobs",
    "linear_loss",
    "linear_p3o_loss",
    "logits_p3o_loss",
    "losses",
    "p3o_loss",
    "response_tokens",
    "sequence_logprobs",
    "token_logprobs",
    "token_p3o_loss",
]
