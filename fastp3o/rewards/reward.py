"""What is maximised: a reward model's score, or a Python function of texts."""

import os
from collections.abc import Callable

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from fastp3o.models.loading import load_reward_model, load_tokenizer
from fastp3o.models.packed_model import PackedModel, scores
from fastp3o.models.reference import on_device
from fastp3o.named_function import import_function
from fastp3o.packing.pack import by_prompt, in_order, pack
from fastp3o.rollouts.transformers_sampler import Rollouts

CPU = torch.device("cpu")
Reward = Callable[[Rollouts], list[float]]


class ModelReward:
    """Scores of a reward model, whose tokenizer may be another than the policy's.

    tokens_per_row: of one forward pass. offload: the model is on the CPU between uses.
    """

    def __init__(
        self,
        model: PackedModel,
        tokenizer: PreTrainedTokenizerBase,
        policy_tokenizer: PreTrainedTokenizerBase,
        *,
        device: torch.device = CPU,
        tokens_per_row: int = 8192,
        share_prompts: bool = True,
        offload: bool = False,
    ):
        self.model = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.device, self.offload = device, offload
        self.tokens_per_row, self.share_prompts = tokens_per_row, share_prompts
        if offload:
            model.to(CPU)
        self.shares_vocabulary = tokenizer.get_vocab() == policy_tokenizer.get_vocab()

    @torch.no_grad()
    def __call__(self, rollouts: Rollouts) -> list[float]:
        prompt_ids, response_ids = rollouts.prompt_ids, rollouts.response_ids
        if not self.shares_vocabulary:
            prompt_ids, response_ids = self.translate(rollouts)
        rows = pack(
            *by_prompt(prompt_ids, response_ids), tokens_per_row=self.tokens_per_row, share_prompts=self.share_prompts
        )
        with on_device(self.model, self.device, offload=self.offload):
            return in_order(rows, [scores(self.model, row.to(self.device)) for row in rows]).tolist()

    def translate(self, rollouts: Rollouts) -> tuple[list[list[int]], list[list[int]]]:
        """The texts in the reward model's tokens; a response keeps its end where it had one."""
        prompt_ids = self.tokenizer(rollouts.prompts).input_ids
        response_ids = self.tokenizer(rollouts.responses, add_special_tokens=False).input_ids
        for ids, finished in zip(response_ids, rollouts.finished, strict=True):
            if finished or not ids:
                ids.append(self.tokenizer.eos_token_id)
        return prompt_ids, response_ids


class FunctionReward:
    """A user's `function(prompts: list[str], responses: list[str]) -> list[float]`, given as `module:function`."""

    def __init__(self, name: str):
        self.name = name
        self.function = import_function(name, "reward function")

    def __call__(self, rollouts: Rollouts) -> list[float]:
        rewards = [float(reward) for reward in self.function(rollouts.prompts, rollouts.responses)]
        if len(rewards) != len(rollouts):
            raise ValueError(f"{self.name} returned {len(rewards)} rewards for {len(rollouts)} responses")
        return rewards


def load_reward(
    name: str,
    policy_tokenizer: PreTrainedTokenizerBase,
    *,
    device: torch.device = CPU,
    dtype: torch.dtype = torch.float32,
    tokens_per_row: int = 8192,
    share_prompts: bool = True,
    offload: bool = False,
    trust_remote_code: bool = False,
) -> Reward:
    """`module:function` is a Python function; anything else a reward model's folder or hub name."""
    if ":" in name and not os.path.exists(name):
        return FunctionReward(name)
    return ModelReward(
        load_reward_model(name, device=device, dtype=dtype, trust_remote_code=trust_remote_code),
        load_tokenizer(name, trust_remote_code=trust_remote_code),
        policy_tokenizer,
        device=device,
        tokens_per_row=tokens_per_row,
        share_prompts=share_prompts,
        offload=offload,
    )


def rewards_of(reward: Reward, rollouts: Rollouts, *, missing_eos_penalty: float = 0.0) -> Tensor:
    """Rewards of S responses, [S] fp32 on the CPU, less the penalty where a response has no end-of-sequence."""
    unfinished = ~torch.tensor(rollouts.finished)
    return torch.tensor(reward(rollouts), dtype=torch.float32) - missing_eos_penalty * unfinished
