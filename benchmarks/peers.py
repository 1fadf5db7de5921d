"""Other libraries' losses on the same inputs. Each is imported when it is called: one that is not
installed is absent.

Log-probs go through the same arithmetic of P3O; Liger's GRPO losses fuse their own, cross-entropies
alone have no coefficients of tokens, and both are measured as they are.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.implementations import hidden_compiled, hidden_eager, p3o_of
from benchmarks.inputs import Inputs
from benchmarks.shapes import CUDA, RESPONSE_TOKENS


class AbsentError(Exception):
    """Why a peer cannot be measured here."""


def needs_cuda(what: str) -> None:
    if not CUDA:
        raise AbsentError(f"{what} runs on a GPU only")


def logits_trl(logits: Tensor, inputs: Inputs) -> Tensor:
    from trl.trainer.utils import selective_log_softmax

    return p3o_of(selective_log_softmax(logits, inputs.labels).float(), inputs)


def logits_liger_grpo(logits: Tensor, inputs: Inputs) -> Tensor:
    """Sequence-level GRPO. It reads logits [B, L + 1, V] and leaves the last position out: one
    token less here.
    """
    needs_cuda("Liger's Triton GRPO loss")
    from liger_kernel.transformers.grpo_loss import triton_grpo_loss

    responses = logits.unflatten(0, (-1, RESPONSE_TOKENS))
    labels = inputs.labels.view(-1, RESPONSE_TOKENS)[:, :-1].contiguous()
    loss, _ = triton_grpo_loss(
        responses,
        (inputs.old_logprobs.view(-1, 1) / RESPONSE_TOKENS).expand_as(labels).contiguous(),
        None,
        labels,
        inputs.rewards.flatten(),
        temperature=1.0,
        beta=0.0,
        loss_type="grpo",
        importance_sampling_level="sequence",
        reduce=True,
    )
    return loss


def trl_logprobs(inputs: Inputs) -> Tensor:
    """Log-probs as TRL's DPO, KTO, GRPO and RLOO trainers compute them."""
    from trl.trainer import utils

    options = 1.0, utils._CHUNKED_LOGPROB_CHUNK_SIZE, None, 1.0, ()
    logprobs, *_ = utils._ChunkedLogProbFunction.apply(
        inputs.hidden, inputs.weight, None, inputs.labels, *options
    )
    return logprobs.float()


def trl_logprobs_of_logits(inputs: Inputs) -> Tensor:
    """Log-probs as TRL's CPO and ORPO trainers compute them."""
    from trl.trainer.utils import selective_log_softmax

    return selective_log_softmax(inputs.hidden @ inputs.weight.T, inputs.labels).float()


def hidden_trl(inputs: Inputs) -> Tensor:
    return p3o_of(trl_logprobs(inputs), inputs)


def hidden_torch(inputs: Inputs) -> Tensor:
    functional = torch.nn.functional
    if not hasattr(functional, "linear_cross_entropy"):
        raise AbsentError(f"torch {torch.__version__} has no linear_cross_entropy")
    losses = functional.linear_cross_entropy(
        inputs.hidden,
        inputs.weight,
        inputs.labels,
        reduction="none",
        options=torch.nn.LinearCrossEntropyOptions(),
    )
    return p3o_of(-losses.float(), inputs)


def hidden_liger_scaled(inputs: Inputs) -> Tensor:
    """Negative log-probs with a gradient of each token's own; by Liger's CuTe kernels on an H100,
    in bf16.
    """
    from liger_kernel.ops import LigerFusedLinearScaledCrossEntropyFunction

    losses = LigerFusedLinearScaledCrossEntropyFunction.apply(
        inputs.hidden, inputs.weight, inputs.labels
    )
    return p3o_of(-losses.float(), inputs)


def hidden_liger_cross_entropy(inputs: Inputs) -> Tensor:
    """The mean cross-entropy, by Liger's CuTe kernels for an H100. It cannot weigh tokens by a
    coefficient.
    """
    needs_cuda("Liger's CuTe cross-entropy")
    from liger_kernel.ops.cutedsl.ops.fused_linear_cross_entropy_sm90 import (
        liger_fused_linear_cross_entropy_sm90,
    )

    return liger_fused_linear_cross_entropy_sm90(inputs.hidden, inputs.weight, inputs.labels)


def hidden_quack(inputs: Inputs) -> Tensor:
    """The mean cross-entropy. QuACK cannot weigh tokens by a coefficient."""
    needs_cuda("QuACK")
    from quack.linear_cross_entropy import chunked_linear_cross_entropy

    return chunked_linear_cross_entropy(inputs.hidden, inputs.weight, inputs.labels)


def hidden_cce(inputs: Inputs) -> Tensor:
    needs_cuda("CCE")
    return cce(inputs, impl="cce")


def hidden_cce_exact(inputs: Inputs) -> Tensor:
    """The filter that leaves small gradients out is off."""
    needs_cuda("CCE")
    return cce(inputs, impl="cce", filter_eps=None)


def hidden_cce_compiled(inputs: Inputs) -> Tensor:
    return cce(inputs, impl="torch_compile")


def cce(inputs: Inputs, **settings: object) -> Tensor:
    from cut_cross_entropy import linear_cross_entropy

    losses = linear_cross_entropy(
        inputs.hidden, inputs.weight, inputs.labels, reduction="none", **settings
    )
    return p3o_of(-losses.float(), inputs)


def hidden_liger_grpo(inputs: Inputs) -> Tensor:
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    compute_loss = LigerFusedLinearGRPOLoss(
        beta=0.0, use_ref_model=False, importance_sampling_level="sequence", loss_type="grpo"
    )
    hidden, weight, labels = response_rows(inputs)
    old = (inputs.old_logprobs.view(-1, 1) / RESPONSE_TOKENS).expand_as(labels)
    advantages = inputs.rewards.flatten().to(inputs.hidden.dtype)
    return compute_loss(
        hidden, weight, labels, torch.ones_like(labels), advantages, old_per_token_logps=old
    )[0]


def response_rows(inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states [B, T, D], weight [V, D] and labels [B, T] of B responses, as Liger takes them."""
    labels = inputs.labels.view(-1, RESPONSE_TOKENS)
    return inputs.hidden.view(*labels.shape, -1), inputs.weight, labels


# What is measured beside fastp3o from hidden states, by the name of its row. Another baseline is a
# function and a line here: at every head and number of tokens.
HIDDEN: dict[str, Callable[[Inputs], Tensor]] = {
    "eager": hidden_eager,
    "TRL": hidden_trl,
    "CCE": hidden_cce,
    "Liger scaled": hidden_liger_scaled,
}
# These compile for each head, or take so long that one head must do.
HIDDEN_FIRST_HEAD: dict[str, Callable[[Inputs], Tensor]] = {
    "QuACK cross-entropy": hidden_quack,
    "Liger cross-entropy": hidden_liger_cross_entropy,
    "torch linear_cross_entropy": hidden_torch,
    "CCE exact": hidden_cce_exact,
    "Liger GRPO": hidden_liger_grpo,
    "torch.compile": hidden_compiled,
    "CCE torch.compile": hidden_cce_compiled,
}
