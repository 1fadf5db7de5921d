"""What is maximised: a reward model's score, or a Python function of texts."""

import importlib
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from fastp3o.models import load_reward_model, load_tokenizer, scores
from fastp3o.padding import pad


@dataclass
class Responses:
    """S responses to be rewarded, as token ids and as texts without special tokens."""

    prompt_ids: list[list[int]]
    response_ids: list[list[int]]
    prompts: list[str]
    responses: list[str]


Reward = Callable[[Responses], list[float]]


class ModelReward:
    """Scores of a reward model, whose tokenizer may be another than the policy's."""

    def __init__(self, model: nn.Module, tokenizer: PreTrainedTokenizerBase, policy_tokenizer: PreTrainedTokenizerBase):
        self.model = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.shares_vocabulary = tokenizer.get_vocab() == policy_tokenizer.get_vocab()
        self.policy_eos = policy_tokenizer.eos_token_id

    @torch.no_grad()
    def __call__(self, batch: Responses) -> list[float]:
        prompt_ids, response_ids = batch.prompt_ids, batch.response_ids
        if not self.shares_vocabulary:
            prompt_ids, response_ids = self.translate(batch)
        padded = pad(prompt_ids, response_ids, pad_token_id=self.tokenizer.pad_token_id)
        return scores(self.model, padded.to(self.model.device)).tolist()

    def translate(self, batch: Responses) -> tuple[list[list[int]], list[list[int]]]:
        """The texts in the reward model's tokens; a response keeps its end where it had one."""
        prompt_ids = self.tokenizer(batch.prompts).input_ids
        response_ids = self.tokenizer(batch.responses, add_special_tokens=False).input_ids
        for translated, original in zip(response_ids, batch.response_ids, strict=True):
            if original[-1] == self.policy_eos or not translated:
                translated.append(self.tokenizer.eos_token_id)
        return prompt_ids, response_ids


class FunctionReward:
    """A user's `function(prompts: list[str], responses: list[str]) -> list[float]`."""

    def __init__(self, name: str):
        module, _, function = name.partition(":")
        sys.path.insert(0, os.getcwd())
        try:
            self.function = getattr(importlib.import_module(module), function)
        except (ImportError, AttributeError) as error:
            raise ValueError(f"cannot load the reward function {name!r}: {error}") from error
        finally:
            sys.path.pop(0)
        self.name = name

    def __call__(self, batch: Responses) -> list[float]:
        rewards = [float(reward) for reward in self.function(batch.prompts, batch.responses)]
        if len(rewards) != len(batch.responses):
            raise ValueError(f"{self.name} returned {len(rewards)} rewards for {len(batch.responses)} responses")
        return rewards


def load_reward(
    name: str, policy_tokenizer: PreTrainedTokenizerBase, *, device: torch.device, trust_remote_code: bool = False
) -> Reward:
    """`module:function` is a Python function; anything else a reward model's folder or hub name."""
    if ":" in name and not os.path.exists(name):
        return FunctionReward(name)
    model = load_reward_model(name, trust_remote_code=trust_remote_code).to(device)
    return ModelReward(model, load_tokenizer(name, trust_remote_code=trust_remote_code), policy_tokenizer)
