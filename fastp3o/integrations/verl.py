"""verl 0.7: importing this module registers the policy loss "p3o" (README.md says how verl's workers import it)."""

from typing import Any

from torch import Tensor
from verl.trainer.ppo.core_algos import register_policy_loss

from fastp3o.integrations.policy_loss import check_siblings, p3o_policy_loss
from fastp3o_kernels import P3OSettings

REMEDY = (
    "Set algorithm.adv_estimator=grpo, algorithm.norm_adv_by_std_in_grpo=False, trainer.balance_batch=False, "
    "actor_rollout_ref.actor.shuffle=False, actor_rollout_ref.actor.use_dynamic_bsz=False and "
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu to a multiple of actor_rollout_ref.rollout.n"
)


@register_policy_loss("p3o")
def p3o(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """P3O's joint loss of a microbatch, tensors [B, C]; rollout_n is K and clip_ratio the clip range.

    Raises ValueError for siblings that are not neighbours, for a second KL, and for rollout correction.
    """
    if config.use_kl_loss:
        raise ValueError("use_kl_loss would add a KL outside P3O's loss: set algorithm.use_kl_in_reward=True instead")
    if rollout_is_weights is not None:
        raise ValueError("P3O's loss does not use rollout correction: leave algorithm.rollout_correction out")
    check_siblings(advantages, response_mask, config.rollout_n, REMEDY)
    # Empty if the actor averages its microbatches itself.
    whole = config.global_batch_info
    divisor = whole["global_batch_size"] / config.rollout_n / whole["dp_size"] if whole else None
    settings = P3OSettings(clip_range=config.clip_ratio, kl_coef=0.0)
    loss, metrics = p3o_policy_loss(
        log_prob, old_log_prob, advantages, response_mask, config.rollout_n, settings, divisor=divisor
    )
    return loss, {f"actor/{name}": value for name, value in metrics.items()}
