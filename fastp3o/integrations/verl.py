"""verl 0.9: importing this module registers the policy loss "p3o" and the trainer mode "p3o"
(README.md says how).
"""

from collections.abc import Sequence
from importlib.metadata import version
from itertools import chain
from typing import Any

from torch import Tensor

from fastp3o.integrations.policy_loss import p3o_policy_loss
from fastp3o_kernels import P3OSettings

__all__ = ["P3OTrainer", "p3o"]

# Before the imports that another version may not have.
if (VERSION := version("verl")) not in ("0.9.0", "0.9.1"):
    raise ImportError(
        f"fastp3o.integrations.verl is for verl 0.9.0 and 0.9.1, and {VERSION} is installed"
    )

from verl.trainer.ppo.core_algos import register_policy_loss
from verl.trainer.ppo.v1 import PPOTrainerSync, register_trainer
from verl.utils import seqlen_balancing, tensordict_utils
from verl.workers import engine_workers

REMEDY = (
    "Set trainer.v1.trainer_mode=p3o, actor_rollout_ref.actor.shuffle=False, "
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu to a multiple of actor_rollout_ref.rollout.n, and "
    "data.train_batch_size and actor_rollout_ref.actor.ppo_mini_batch_size to multiples of the data-parallel size"
)
VERLS_OWN: Any = engine_workers.ppo_loss
# The rows of the microbatch whose loss is due, siblings as neighbors.
ROWS: list[list[int]] = []


def sibling_rows(uids: Sequence[str], K: int) -> list[int]:
    """All rows, those of a prompt as neighbors. Raises ValueError if a prompt does not have K of
    them.
    """
    rows: dict[str, list[int]] = {}
    for row, uid in enumerate(uids):
        rows.setdefault(uid, []).append(row)
    if parted := sum(len(own) != K for own in rows.values()):
        raise ValueError(
            f"{parted} of {len(rows)} prompts do not have exactly {K} responses in one place. {REMEDY}"
        )
    return list(chain.from_iterable(rows.values()))


def ppo_loss(
    config: Any, model_output: Any, data: Any, dp_group: Any = None
) -> tuple[Tensor, dict]:
    """verl's own, which does not tell a policy loss whose rows it gets."""
    if config.policy_loss.loss_mode == "p3o" and (uids := tensordict_utils.get(data, "uid")):
        ROWS[:] = [sibling_rows(uids, config.rollout_n)]
    return VERLS_OWN(config, model_output, data, dp_group)


engine_workers.ppo_loss = ppo_loss


@register_policy_loss("p3o")
def p3o(
    *,
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    config: Any,
    **options: Any,
) -> tuple[Tensor, dict[str, float]]:
    """P3O's joint loss of a microbatch, tensors [B, C]; rollout_n is K and clip_ratio the clip
    range. Raises ValueError for a second KL, for rollout correction, and where the rows' prompts
    are unknown.
    """
    if config.use_kl_loss:
        raise ValueError(
            "use_kl_loss would add a KL outside P3O's loss: set algorithm.use_kl_in_reward=True instead"
        )
    if options.get("rollout_is_weights") is not None:
        raise ValueError(
            "P3O's loss does not use rollout correction: leave algorithm.rollout_correction out"
        )
    if not ROWS:
        raise ValueError(
            "P3O learns which rows are siblings from verl's engine workers, without distillation"
        )
    rows = ROWS.pop()
    # Without a size of the whole batch the mean is over the microbatch, as in verl's own losses.
    whole, K = config.global_batch_info, config.rollout_n
    size = whole.get("global_batch_size")
    divisor = None if size is None else size / K / whole["dp_size"]
    settings = P3OSettings(clip_range=config.clip_ratio, kl_coef=0.0)
    log_prob, old_log_prob, advantages, mask = (
        t[rows] for t in (log_prob, old_log_prob, advantages, response_mask)
    )
    loss, metrics = p3o_policy_loss(
        log_prob, old_log_prob, advantages, mask, K, settings, divisor=divisor
    )
    return loss, {f"actor/{name}": value for name, value in metrics.items()}


@register_trainer("p3o")
class P3OTrainer(PPOTrainerSync):
    """verl's synchronous trainer, where all responses to a prompt stay neighbors in one process.
    Raises ValueError for advantages that are not rewards less the mean of their prompt's.
    """

    def __init__(self, config: Any):
        algorithm = config.algorithm
        if algorithm.adv_estimator != "grpo" or algorithm.norm_adv_by_std_in_grpo:
            raise ValueError(
                "P3O needs algorithm.adv_estimator=grpo and algorithm.norm_adv_by_std_in_grpo=False"
            )
        # verl reads the mode's options, and its kind of replay buffer, by this name.
        config.trainer.v1.trainer_mode = "sync"
        super().__init__(config)

    def _balance_batch(
        self, batch: Any, metrics: dict, logging_prefix: str = "global_seqlen", **options: Any
    ) -> Any:
        batch = super()._balance_batch(batch, metrics, logging_prefix, **options)
        K = self.config.actor_rollout_ref.rollout.n
        processes = max(self.actor_rollout_wg._dispatch_info["actor"]) + 1
        # A key is "{uid}_{session}_{output}".
        batch.reorder(sibling_rows([key.split("_")[0] for key in batch.keys], K))
        lengths = [tag["seq_len"] for tag in batch.tags]
        prompts = [row // K for row in range(len(batch))]
        if len(batch) // K % processes:
            raise ValueError(
                f"{processes} processes cannot have equally many of {len(batch) // K} prompts. {REMEDY}"
            )
        parts = seqlen_balancing.get_group_balanced_partitions(lengths, prompts, processes)
        batch.reorder(list(chain.from_iterable(parts)))
        metrics.update(seqlen_balancing.log_seqlen_unbalance(lengths, parts, logging_prefix))
        return batch

    def _update_actor(self, batch: Any, metrics: dict) -> Any:
        if self.config.actor_rollout_ref.actor.use_dynamic_bsz:
            batch.extra_info["force_group_size"] = self.config.actor_rollout_ref.rollout.n
        return super()._update_actor(batch, metrics)
