"""Reward and sequence KL of a policy on a fixed set of prompts: one point of the paper's KL-reward frontier."""

from dataclasses import dataclass
from functools import partial

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from datasets import Dataset
from torch import Tensor, nn

from fastp3o.models.packed_model import labelled_logprobs
from fastp3o.models.reference import Reference
from fastp3o.models.sharding import map_rows_in_lockstep
from fastp3o.packing.pack import Packing, by_group, derived_seed, pack, process_share
from fastp3o.rewards.reward import Reward, logged_means, rewarded
from fastp3o.rollouts.groups import Group, Sampler, finished, lengths, make_prompts, token_ids
from fastp3o_kernels import sequence_logprobs

# Sets evaluation seeds apart from those of updates, which are counted from 0.
EVALUATION = 2**32 - 1


@dataclass(frozen=True)
class Evaluation:
    """Samples responses to every prompt, always with the same seed, and rewards them.

    rewards: keys are the names of their means. prompts: with the columns that rewards ask for.
    """

    accelerator: Accelerator
    policy: nn.Module
    reference: Reference
    sampler: Sampler
    rewards: dict[str, Reward]
    prompts: Dataset
    packing: Packing
    responses_per_prompt: int
    seed: int

    def __call__(self) -> dict[str, float]:
        """Means over prompts of: rewards (no penalties), KL to the reference in nats per sequence (log π − log π_ref of
        the samples), response length in tokens, share without end-of-sequence. `_std` is the standard deviation over
        prompts. And means of what rewards log.
        """
        numbers = process_share(list(range(len(self.prompts))), self.accelerator)
        prompts = make_prompts(self.prompts[numbers], numbers)
        groups = self.sampler(prompts, self.responses_per_prompt, derived_seed(self.seed, EVALUATION))
        with self.accelerator.autocast():
            with_deviation = rewarded(self.rewards, groups)
            with_deviation["kl"] = self.sequence_log_ratios(groups)
        values = {
            **with_deviation,
            "response_length": lengths(groups),
            "missing_eos": 1 - finished(groups).float(),
        }
        metrics: dict[str, float] = {}
        for name, response_values in values.items():
            prompt_means = torch.tensor(gather_object(response_values.mean(dim=1).tolist()))
            metrics[name] = prompt_means.mean().item()
            if name in with_deviation:
                metrics[f"{name}_std"] = prompt_means.std().item() if len(prompt_means) > 1 else 0.0
        return {**metrics, **logged_means(self.rewards), "prompts": len(self.prompts)}

    @torch.no_grad()
    def sequence_log_ratios(self, groups: list[Group]) -> Tensor:
        """log π(y|x) − log π_ref(y|x) of each response, [P, K] fp32."""
        rows = [row.to(self.accelerator.device) for row in pack(*token_ids(groups), self.packing)]
        logprobs = map_rows_in_lockstep(rows, partial(labelled_logprobs, self.policy))
        log_ratios = [
            sequence_logprobs(policy_logprobs - ref_logprobs, row.cu_seqlens)
            for row, policy_logprobs, ref_logprobs in zip(rows, logprobs, self.reference(rows), strict=True)
        ]
        return by_group(rows, log_ratios)
