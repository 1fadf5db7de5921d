"""Stage 2, reward modelling: a scalar head trained on comparisons, -log σ(r(better) - r(worse)) (Bradley-Terry)."""

from dataclasses import dataclass
from functools import partial
from itertools import combinations
from typing import Any

import torch
import torch.nn.functional as F
from datasets import Dataset
from torch import Tensor, nn

from fastp3o.data.loading import load_rankings
from fastp3o.evaluation.calibration import judged
from fastp3o.models.loading import load_reward_model
from fastp3o.models.packed_model import scores
from fastp3o.models.sharding import map_rows_in_lockstep
from fastp3o.objectives.base import LossAndMetrics, with_count
from fastp3o.packing.pack import pack
from fastp3o.packing.packed_row import PackedRow
from fastp3o.packing.shares import Examples
from fastp3o.runtime.context import Caller
from fastp3o.runtime.processes import on_main_process
from fastp3o.training.config import RewardModelConfig
from fastp3o.training.supervised import SupervisedTask, train_supervised


def train(config: RewardModelConfig, caller: Caller | None = None) -> None:
    """Trains a reward model on rankings; a preference is a ranking of two. `accuracy` is the share of pairs whose
    better response has the higher score, a mean over prompts.
    """
    train_supervised(RewardModelling(config), caller)


@dataclass(frozen=True)
class RankedRow(PackedRow):
    """A packed row whose groups hold responses from best to worst, and its n pairs."""

    better: Tensor  # [n] int64, numbers of responses in the row
    worse: Tensor  # [n] int64
    margins: Tensor  # [n] fp32, how much better the better one is, as the data have it
    weights: Tensor  # [n] fp32, one over the pairs of the group
    group_of_pair: Tensor  # [n] int64, numbers of groups


class RewardModelling(SupervisedTask[RankedRow]):
    """Bradley and Terry's model of comparisons. It counts prompts: a ranking of K has the mean of its K (K − 1) / 2
    pairs, as in InstructGPT (arXiv 2203.02155, equation 1).
    """

    config: RewardModelConfig
    name = "reward model"
    load_examples = staticmethod(load_rankings)
    load_model = staticmethod(partial(load_reward_model, new_head=True))

    def pack(self, examples: Examples) -> list[RankedRow]:
        """Rows with all pairs of their groups. A response is scored once, however many pairs it is in."""
        ranked_rows = []
        for row in pack(examples["prompt_ids"], examples["ranked_ids"], self.config.packing):
            pairs: list[tuple[int, int, float, float, int]] = []
            first = 0
            for group in row.groups:
                K = len(examples["ranked_ids"][group])
                in_group = list(combinations(range(first, first + K), 2))
                margin, weight = float(examples["margin"][group]), 1 / len(in_group)
                pairs += [(better, worse, margin, weight, group) for better, worse in in_group]
                first += K
            names = "better", "worse", "margins", "weights", "group_of_pair"
            columns = map(torch.tensor, zip(*pairs, strict=True))
            tensors: dict[str, Any] = dict(zip(names, columns, strict=True))
            ranked_rows.append(RankedRow(**vars(row), **tensors))
        return ranked_rows

    def loss(self, model: nn.Module, row: RankedRow, divisor: float | Tensor) -> LossAndMetrics:
        return self.scored_loss(scores(model, row), row, divisor)

    def scored_loss(self, scores: Tensor, row: RankedRow, divisor: float | Tensor) -> LossAndMetrics:
        better, worse = scores[row.better], scores[row.worse]
        sums = bradley_terry(better, worse, row.weights, margins=row.margins, centring=self.config.centring)
        return sums.pop("loss") / divisor, with_count(sums, self.count(row))

    def count(self, row: RankedRow) -> int:
        """Prompts."""
        return len(row.groups)

    @torch.no_grad()
    def evaluate(self, model: nn.Module, data: Dataset) -> dict[str, float]:
        """Means of the losses, and the calibration of the pairs (`judged`)."""
        accelerator = self.context.accelerator
        numbers = self.context.share.numbers(len(data))
        examples = data[numbers]
        rows = [row.to(accelerator.device) for row in self.pack(examples)]
        with accelerator.autocast():
            row_scores = map_rows_in_lockstep(rows, lambda row: scores(model, row))
            losses = [self.scored_loss(values, row, 1.0) for values, row in zip(row_scores, rows, strict=True)]
        means = self.means(rows, losses)
        differences = []
        for values, row in zip(row_scores, rows, strict=True):
            groups, margins = row.group_of_pair.tolist(), (values[row.better] - values[row.worse]).tolist()
            differences += [(numbers[group], margin) for group, margin in zip(groups, margins, strict=True)]
        differences = self.context.share.gather(differences)
        return means | on_main_process(accelerator, lambda: judged(differences))


def bradley_terry(
    better: Tensor,
    worse: Tensor,
    weights: Tensor | float = 1.0,
    *,
    margins: Tensor | float = 0.0,
    centring: float = 0.0,
) -> dict[str, Tensor]:
    """Weighted sums over n pairs of the loss, of correct decisions (a tie counts a half) and of the margin. better,
    worse: scores [n] fp32.

    loss: -log σ(r_w − r_l − m) + c (r_w + r_l)², with the margins m of Llama 2 (arXiv 2307.09288, equation 2) and the
    coefficient c of centring (arXiv 2312.09244). If c is not 0, `centre` is the mean of the two scores.
    """
    margin = better - worse
    sums = {
        "loss": -(weights * F.logsigmoid(margin - margins)).sum(),
        "accuracy": (weights * (margin.sign() + 1) / 2).sum(),
        "margin": (weights * margin).sum(),
    }
    if centring:
        sums["loss"] = sums["loss"] + centring * (weights * (better + worse).square()).sum()
        sums["centre"] = (weights * (better + worse) / 2).sum()
    return sums
