"""OpenRLHF 0.11.1 and 0.11.2: an actor trainer with P3O's loss, and a replay buffer that keeps
siblings together.
"""

from importlib.metadata import version
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from fastp3o.integrations.policy_loss import p3o_policy_loss
from fastp3o_kernels import P3OSettings

__all__ = ["P3OActorTrainer", "register"]

# Before the imports that another version may not have.
if (VERSION := version("openrlhf")) not in ("0.11.1", "0.11.2"):
    raise ImportError(
        f"fastp3o.integrations.openrlhf is for OpenRLHF 0.11.1 and 0.11.2, and {VERSION} is installed"
    )

from openrlhf.trainer.ppo_utils.replay_buffer import NaiveReplayBuffer
from openrlhf.trainer.ray import ppo_actor


def register() -> None:
    """Makes the actors of this process train on P3O."""
    ppo_actor.ActorPPOTrainer = P3OActorTrainer


class P3OActorTrainer(ppo_actor.ActorPPOTrainer):
    """Actor trainer with P3O's loss. K is rollout.n_samples_per_prompt, the clip range is the lower
    end of actor.eps_clip_low_high, and the KL is in the reward. Raises ValueError for options that
    would part siblings, count the KL twice or make all differences of rewards equal.
    """

    replay_buffer: Any

    def __init__(self, strategy: Any, *arguments: Any, **options: Any):
        args = strategy.args
        advantage = args.algo.advantage
        corrected = (
            advantage.is_correction_enable
            if VERSION == "0.11.1"
            else advantage.is_correction_level != "off"
        )
        if args.train.dynamic_batch_enable or args.algo.kl.use_loss or corrected:
            raise ValueError(
                "switch off train.dynamic_batch_enable, algo.kl.use_loss and algo.advantage.is_correction"
            )
        if advantage.estimator != "dr_grpo":
            raise ValueError(
                'P3O needs algo.advantage.estimator "dr_grpo": rewards less the mean of their prompt\'s'
            )
        super().__init__(strategy, *arguments, **options)
        K = args.rollout.n_samples_per_prompt
        self.actor_loss_fn = P3OLoss(
            K, P3OSettings(clip_range=args.actor.eps_clip_low_high[0], kl_coef=0.0)
        )
        old = self.replay_buffer
        self.replay_buffer = SiblingsBuffer(
            old.sample_batch_size,
            old.limit,
            old.cpu_offload,
            old.packing_samples,
            responses_per_prompt=K,
        )


class P3OLoss(nn.Module):
    """Replaces OpenRLHF's PolicyLoss."""

    def __init__(self, responses_per_prompt: int, settings: P3OSettings):
        super().__init__()
        self.responses_per_prompt, self.settings = responses_per_prompt, settings

    def forward(
        self,
        log_probs: Tensor,
        old_log_probs: Tensor,
        advantages: Tensor,
        action_mask: Tensor,
        rollout_log_probs: Tensor | None = None,
        dp_size: int = 1,
        batch_num_tokens: Tensor | None = None,
        global_batch_size: Tensor | None = None,
    ) -> tuple[Tensor | None, ...]:
        """Loss, share of clipped pairs, KL to the policy that sampled, None for each metric of
        rollout correction.
        """
        K = self.responses_per_prompt
        divisor = None if global_batch_size is None else global_batch_size / K / dp_size
        loss, metrics = p3o_policy_loss(
            log_probs, old_log_probs, advantages, action_mask, K, self.settings, divisor=divisor
        )
        clipped, kl = (
            log_probs.new_tensor(metrics[f"p3o/{name}"]) for name in ("clip_fraction", "kl")
        )
        return loss, clipped, kl, *((None,) if VERSION == "0.11.1" else (None, None))


class SiblingsBuffer(NaiveReplayBuffer):
    """A buffer whose items are prompts with all their responses, so that a loader's shuffling keeps
    these together.
    """

    items: list

    def __init__(self, sample_batch_size: int, *arguments: Any, responses_per_prompt: int):
        if sample_batch_size % responses_per_prompt:
            size, K = sample_batch_size, responses_per_prompt
            raise ValueError(
                f"the micro batch size ({size}) must be a multiple of n_samples_per_prompt ({K})"
            )
        super().__init__(sample_batch_size // responses_per_prompt, *arguments)
        self.responses_per_prompt = responses_per_prompt

    @torch.no_grad()
    def append(self, experience: Any) -> None:
        super().append(experience)
        groups: dict[str, list] = {}
        for item in self.items:
            groups.setdefault(item.prompts[0], []).append(item)
        self.items = list(chain.from_iterable(groups.values()))

    def __len__(self) -> int:
        return len(self.items) // self.responses_per_prompt

    def __getitem__(self, number: int) -> list:
        K = self.responses_per_prompt
        group = self.items[K * number : K * (number + 1)]
        if len({item.prompts[0] for item in group}) != 1 or len(self.items) % K:
            remedy = "make a rollout's prompts a multiple of the actors, without dynamic filtering and train.balance"
            raise ValueError(
                f"this process does not have all {K} responses to each of its prompts: {remedy}"
            )
        return group

    def collate_fn(self, batch: list[list]) -> Any:
        return super().collate_fn(list(chain.from_iterable(batch)))
