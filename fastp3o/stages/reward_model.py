"""Stage 2, reward modelling: a scalar head trained on comparisons, -log σ(r(chosen) - r(rejected)) (Bradley-Terry)."""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from fastp3o.config import SupervisedConfig
from fastp3o.data import load_preferences
from fastp3o.models.loading import load_reward_model
from fastp3o.models.packed_model import PackedModel, scores
from fastp3o.packing.pack import pack
from fastp3o.packing.packed_row import PackedRow
from fastp3o.stages.supervised import Examples, SupervisedTask, train_supervised


@dataclass(frozen=True, kw_only=True)
class RewardModelConfig(SupervisedConfig):
    """Stage 2: a scalar head trained on comparisons (Bradley-Terry)."""


def train(config: RewardModelConfig) -> None:
    """Trains a reward model on preference pairs; `accuracy` is the share of pairs with the chosen response ahead."""
    train_supervised(RewardModelling(config))


class RewardModelling(SupervisedTask[PackedRow]):
    """Bradley and Terry's model of comparisons."""

    name = "reward model"
    load_examples = staticmethod(load_preferences)

    def __init__(self, config: RewardModelConfig):
        self.config = config

    def load_model(self) -> PackedModel:
        return load_reward_model(self.config.model, new_head=True, trust_remote_code=self.config.trust_remote_code)

    def pack(self, examples: Examples) -> list[PackedRow]:
        responses = list(zip(examples["chosen_ids"], examples["rejected_ids"], strict=True))
        return pack(examples["prompt_ids"], responses, self.config.packing)

    def losses(self, model: nn.Module, row: PackedRow) -> dict[str, Tensor]:
        chosen, rejected = scores(model, row).view(-1, 2).unbind(1)
        return bradley_terry(chosen, rejected)

    def count(self, examples: Examples) -> int:
        """Pairs."""
        return len(examples["chosen_ids"])


def bradley_terry(chosen: Tensor, rejected: Tensor) -> dict[str, Tensor]:
    """Sums over P pairs of the loss, of correct decisions (a tie counts a half) and of the margin; scores [P] fp32."""
    margin = chosen - rejected
    return {
        "loss": -F.logsigmoid(margin).sum(),
        "accuracy": ((margin.sign() + 1) / 2).sum(),
        "margin": margin.sum(),
    }
