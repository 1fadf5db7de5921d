"""P3O's update: the clipped loss on reward differences, from hidden states in one operation."""

from accelerate import Accelerator
from torch import Tensor, nn

from fastp3o.config import P3OConfig
from fastp3o.models.packed_model import PackedModel
from fastp3o.rewards.scaling import AbsoluteScaler, DifferenceScaler
from fastp3o.training.minibatches import Pairs
from fastp3o_kernels import Head, P3OLossOutput, linear_p3o_loss


class P3O:
    """Pairwise Proximal Policy Optimization, arXiv 2310.00212; an Algorithm."""

    def __init__(self, config: P3OConfig):
        self.config = config
        self.averages_tokens = config.clipping == "token"
        self.clip_range = config.clip_range
        self.learning_rates = {}
        kind = AbsoluteScaler if config.reward_scaling == "absolute" else DifferenceScaler
        self.scaler = kind(config.reward_clip, scale=config.reward_scaling != "none")

    def add_to(self, policy: PackedModel) -> None:
        """There is no critic."""

    def prepare(self, accelerator: Accelerator, policy: nn.Module, minibatches: list[list[Pairs]]) -> list[list[Pairs]]:
        """Rollouts, their rewards and log-probs are all that the loss takes."""
        return minibatches

    def loss(self, policy: nn.Module, pairs: Pairs) -> P3OLossOutput:
        return pairs_loss(policy, pairs, self.config)


def pairs_loss(policy: nn.Module, pairs: Pairs, config: P3OConfig) -> P3OLossOutput:
    """P3O's loss of one packed row."""

    def loss(hidden: Tensor, head: Head) -> P3OLossOutput:
        return linear_p3o_loss(
            hidden,
            head,
            pairs.row.labels,
            pairs.row.cu_seqlens_on_host,
            pairs.old_logprobs,
            pairs.ref_logprobs,
            pairs.rewards,
            config,
            old_token_logprobs=pairs.old_token_logprobs if config.clipping == "token" else None,
        )

    return policy(pairs.row, pairs.row.scored_at, loss)
