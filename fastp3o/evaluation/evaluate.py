"""Reward and sequence KL of a policy on a fixed set of prompts: one point of the paper's KL-reward frontier."""

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from datasets import Dataset
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from fastp3o.config import OnlineConfig
from fastp3o.models.packed_model import scored_logprobs, unwrap
from fastp3o.models.reference import Reference
from fastp3o.packing.pack import by_prompt, in_order, pack
from fastp3o.rewards.reward import Reward, rewards_of
from fastp3o.rollouts.transformers_sampler import Rollouts, sample
from fastp3o.training.order import seed_of, share_of_process
from fastp3o_kernels import sequence_logprobs


def evaluate(
    accelerator: Accelerator,
    policy: nn.Module,
    reference: Reference,
    tokenizer: PreTrainedTokenizerBase,
    reward: Reward,
    gold: Reward | None,
    prompts: Dataset,
    config: OnlineConfig,
) -> dict[str, float]:
    """Samples `eval_samples` responses to every prompt, always with the same seed.

    Means over prompts of: reward (no penalties), the gold reward where there is one, KL to the reference in nats per
    sequence (log π − log π_ref of the samples), response length in tokens, share without end-of-sequence. `_std` is the
    standard deviation over prompts.
    """
    rows = share_of_process(list(range(len(prompts))), accelerator)
    mine = prompts[rows]
    rollouts = sample(
        unwrap(policy),
        tokenizer,
        mine["prompt"],
        mine["prompt_ids"],
        responses_per_prompt=config.eval_samples,
        max_response_tokens=config.max_response_tokens,
        batch_size=config.eval_batch_size,
        seed=seed_of(config.seed, EVALUATION, accelerator.process_index),
    )
    with accelerator.autocast():
        rewards = rewards_of(reward, rollouts)
        golds = {} if gold is None else {"gold": rewards_of(gold, rollouts)}
        kl = sequence_log_ratios(accelerator, policy, reference, rollouts, config)
    values = {
        "reward": rewards,
        **golds,
        "kl": kl.cpu(),
        "response_length": torch.tensor([len(ids) for ids in rollouts.response_ids]).float(),
        "missing_eos": 1 - torch.tensor(rollouts.finished).float(),
    }
    metrics: dict[str, float] = {}
    for name, of_responses in values.items():
        of_prompts = of_responses.view(-1, config.eval_samples).mean(dim=1)
        everywhere = torch.tensor(gather_object(of_prompts.tolist()))
        metrics[name] = everywhere.mean().item()
        if name in ("reward", "gold", "kl"):
            metrics[f"{name}_std"] = everywhere.std().item() if len(everywhere) > 1 else 0.0
    return {**metrics, "prompts": len(prompts)}


# Sets evaluation seeds apart from those of updates, which are counted from 0.
EVALUATION = 2**32 - 1


@torch.no_grad()
def sequence_log_ratios(
    accelerator: Accelerator, policy: nn.Module, reference: Reference, rollouts: Rollouts, config: OnlineConfig
) -> Tensor:
    """log π(y|x) − log π_ref(y|x) of each response, [S] fp32."""
    rows = pack(
        *by_prompt(rollouts.prompt_ids, rollouts.response_ids),
        tokens_per_row=config.tokens_per_row,
        share_prompts=config.share_prompts,
    )
    rows = [row.to(accelerator.device) for row in rows]
    of_rows = [
        sequence_logprobs(scored_logprobs(policy, row) - ref_logprobs, row.cu_seqlens)
        for row, ref_logprobs in zip(rows, reference(rows), strict=True)
    ]
    return in_order(rows, of_rows)
