"""What is maximised: a reward model's score, or a Python function of texts."""

import importlib
import os
import sys
from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from fastp3o.models import load_reward_model, load_tokenizer, scores
from fastp3o.padding import pad
from fastp3o.rollouts import Rollouts

Reward = Callable[[Rollouts], list[float]]


class ModelReward:
    """Scores of a reward model, whose tokenizer may be another than the policy's."""

    def __init__(self, model: nn.Module, tokenizer: PreTrainedTokenizerBase, policy_tokenizer: PreTrainedTokenizerBase):
        self.model = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.shares_vocabulary = tokenizer.get_vocab() == policy_tokenizer.get_vocab()

    @torch.no_grad()
    def __call__(self, rollouts: Rollouts) -> list[float]:
        prompt_ids, response_ids = rollouts.prompt_ids, rollouts.response_ids
        if not self.shares_vocabulary:
            prompt_ids, response_ids = self.translate(rollouts)
        padded = pad(prompt_ids, response_ids, pad_token_id=self.tokenizer.pad_token_id)
        return scores(self.model, padded.to(self.model.device)).tolist()

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
        module, _, function = name.partition(":")
        sys.path.insert(0, os.getcwd())
        try:
            self.function = getattr(importlib.import_module(module), function)
        except (ImportError, AttributeError) as error:
            raise ValueError(f"cannot load the reward function {name!r}: {error}") from error
        finally:
            sys.path.pop(0)

    def __call__(self, rollouts: Rollouts) -> list[float]:
        rewards = [float(reward) for reward in self.function(rollouts.prompts, rollouts.responses)]
        if len(rewards) != len(rollouts):
            raise ValueError(f"{self.name} returned {len(rewards)} rewards for {len(rollouts)} responses")
        return rewards


def load_reward(
    name: str, policy_tokenizer: PreTrainedTokenizerBase, *, device: torch.device, trust_remote_code: bool = False
) -> Reward:
    """`module:function` is a Python function; anything else a reward model's folder or hub name."""
    if ":" in name and not os.path.exists(name):
        return FunctionReward(name)
    model = load_reward_model(name, trust_remote_code=trust_remote_code).to(device)
    return ModelReward(model, load_tokenizer(name, trust_remote_code=trust_remote_code), policy_tokenizer)


def rewards_of(reward: Reward, rollouts: Rollouts, *, batch_size: int, missing_eos_penalty: float = 0.0) -> Tensor:
    """Rewards of S responses, [S] fp32 on the CPU, less the penalty where a response has no end-of-sequence."""
    values = [
        value for first in range(0, len(rollouts), batch_size) for value in reward(rollouts[first : first + batch_size])
    ]
    unfinished = ~torch.tensor(rollouts.finished)
    return torch.tensor(values, dtype=torch.float32) - missing_eos_penalty * unfinished
