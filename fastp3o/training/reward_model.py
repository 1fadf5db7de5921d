"""Stage 2, reward modeling: a head trained on comparisons, -log σ of the log-odds that the better
one is better: the difference of two scores (Bradley-Terry), or a form of two vectors (a preference
model).
"""

from dataclasses import dataclass
from functools import partial
from itertools import combinations
from typing import Any

import torch
import torch.nn.functional as F
from datasets import Dataset
from torch import Tensor, nn

from fastp3o.data.loading import load_rankings
from fastp3o.evaluation.calibration import judged, numbered
from fastp3o.evaluation.circular import Compared, circular_triples
from fastp3o.models.loading import load_reward_model
from fastp3o.models.packed_model import scores, vectors
from fastp3o.models.preference import log_odds
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
    """Trains a reward model, or a preference model, on rankings; a preference is a ranking of two.
    `accuracy` is the share of pairs whose better response is ahead, a mean over prompts.
    """
    train_supervised(
        (PreferenceModeling if config.preference_dim else RewardModeling)(config), caller
    )


@dataclass(frozen=True)
class RankedRow(PackedRow):
    """A packed row whose groups hold responses from best to worst, and its n pairs."""

    better: Tensor  # [n] int64, numbers of responses in the row
    worse: Tensor  # [n] int64
    margins: Tensor  # [n] fp32, how much better the better one is, as the data have it
    probabilities: Tensor  # [n] fp32, that it is better: 1 unless the data have soft labels
    weights: Tensor  # [n] fp32, one over the pairs of the group
    group_of_pair: Tensor  # [n] int64, numbers of groups


class RewardModeling(SupervisedTask[RankedRow]):
    """Bradley and Terry's model of comparisons. It counts prompts: a ranking of K has the mean of
    its K (K − 1) / 2 pairs, as in InstructGPT (arXiv 2203.02155, equation 1).
    """

    config: RewardModelConfig
    name = "reward model"
    load_examples = staticmethod(load_rankings)
    load_model = staticmethod(partial(load_reward_model, new_head=True))

    def pack(self, examples: Examples) -> list[RankedRow]:
        """Rows with all pairs of their groups. A response is scored once, however many pairs it is
        in.
        """
        ranked_rows = []
        for row in pack(examples["prompt_ids"], examples["ranked_ids"], self.config.packing):
            pairs: list[tuple[int, int, float, float, float, int]] = []
            first = 0
            for group in row.groups:
                K = len(examples["ranked_ids"][group])
                in_group = list(combinations(range(first, first + K), 2))
                labels = float(examples["margin"][group]), float(examples["probability"][group])
                pairs += [
                    (better, worse, *labels, 1 / len(in_group), group) for better, worse in in_group
                ]
                first += K
            names = "better", "worse", "margins", "probabilities", "weights", "group_of_pair"
            columns = map(torch.tensor, zip(*pairs, strict=True))
            tensors: dict[str, Any] = dict(zip(names, columns, strict=True))
            ranked_rows.append(RankedRow(**vars(row), **tensors))
        return ranked_rows

    def loss(self, model: nn.Module, row: RankedRow, divisor: float | Tensor) -> LossAndMetrics:
        return self.loss_of(self.outputs(model, row), row, divisor)

    def loss_of(self, outputs: Tensor, row: RankedRow, divisor: float | Tensor) -> LossAndMetrics:
        sums = self.sums(outputs[row.better], outputs[row.worse], row)
        return sums.pop("loss") / divisor, with_count(sums, self.count(row))

    def outputs(self, model: nn.Module, row: RankedRow) -> Tensor:
        """What the head gives each response of a row: its score, [S]."""
        return scores(model, row)

    def log_odds(self, better: Tensor, worse: Tensor) -> Tensor:
        """log P(better ≻ worse) − log P(worse ≻ better) by their outputs, [n]."""
        return better - worse

    def sums(self, better: Tensor, worse: Tensor, row: RankedRow) -> dict[str, Tensor]:
        """Sums of loss and metrics over a row's pairs, by the outputs of each pair's responses."""
        labels = {"margins": row.margins, "probabilities": row.probabilities}
        return bradley_terry(better, worse, row.weights, centring=self.config.centring, **labels)

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
            row_outputs = map_rows_in_lockstep(rows, lambda row: self.outputs(model, row))
            losses = [
                self.loss_of(outputs, row, 1.0)
                for outputs, row in zip(row_outputs, rows, strict=True)
            ]
        means = self.means(rows, losses)
        pairs: list[tuple[int, float, float]] = []
        for outputs, row in zip(row_outputs, rows, strict=True):
            records = (numbers[group] for group in row.group_of_pair.tolist())
            ahead = self.log_odds(outputs[row.better], outputs[row.worse]).tolist()
            pairs += zip(records, ahead, row.probabilities.tolist(), strict=True)
        pairs = self.context.share.gather(pairs)
        means |= on_main_process(accelerator, lambda: judged(pairs, numbered(data["prompt_ids"])))
        return means | self.further(examples, rows, row_outputs)

    def further(
        self, examples: Examples, rows: list[RankedRow], outputs: list[Tensor]
    ) -> dict[str, float]:
        """Further metrics of held-out data, by the outputs of each row."""
        return {}


class PreferenceModeling(RewardModeling):
    """A vector for each response, of which two give the log-odds (`fastp3o.models.preference`)."""

    def __init__(self, config: RewardModelConfig):
        super().__init__(config)
        self.load_model = partial(
            load_reward_model, new_head=True, vector_size=config.preference_dim
        )

    def outputs(self, model: nn.Module, row: RankedRow) -> Tensor:
        """The vectors of a row's responses, [S, 2k]."""
        return vectors(model, row)

    def log_odds(self, better: Tensor, worse: Tensor) -> Tensor:
        return log_odds(better, worse)

    def sums(self, better: Tensor, worse: Tensor, row: RankedRow) -> dict[str, Tensor]:
        labels = {"margins": row.margins, "probabilities": row.probabilities}
        return comparison_sums(log_odds(better, worse), row.weights, **labels)

    def further(
        self, examples: Examples, rows: list[RankedRow], outputs: list[Tensor]
    ) -> dict[str, float]:
        """The shares of circular triples, by the model and by the labels."""
        compared: list[Compared] = []
        for row, of_row in zip(rows, outputs, strict=True):
            ranked = [list(map(tuple, examples["ranked_ids"][group])) for group in row.groups]
            of_groups = of_row.split(list(map(len, ranked)))
            for group, responses, of_group in zip(row.groups, ranked, of_groups, strict=True):
                prompt = tuple(examples["prompt_ids"][group])
                probability = examples["probability"][group]
                compared.append(Compared(prompt, responses, of_group.tolist(), probability))
        compared = self.context.share.gather(compared)
        return on_main_process(self.context.accelerator, lambda: circular_triples(compared))


def comparison_sums(
    log_odds: Tensor,
    weights: Tensor | float = 1.0,
    *,
    margins: Tensor | float = 0.0,
    probabilities: Tensor | float = 1.0,
) -> dict[str, Tensor]:
    """Weighted sums over n pairs of the loss, of correct decisions (a tie counts a half) and of the
    margin. log_odds: z of the better response of a pair over the worse one, [n] fp32.

    loss: the cross entropy -p log σ(z − m) − (1 − p) log σ(m − z), with the labels' probability p
    that the better one is better, and the margins m of Llama 2 (arXiv 2307.09288, equation 2). A
    soft label counts as a share p of raters who prefer the better one, and 1 − p who prefer the
    worse one: in the loss, and in accuracy and margin.
    """
    beyond, opposed = log_odds - margins, 1 - probabilities
    cross_entropy = probabilities * F.logsigmoid(beyond) + opposed * F.logsigmoid(-beyond)
    return {
        "loss": -(weights * cross_entropy).sum(),
        "accuracy": (weights * (0.5 + log_odds.sign() * (probabilities - 0.5))).sum(),
        "margin": (weights * log_odds * (probabilities - opposed)).sum(),
    }


def bradley_terry(
    better: Tensor,
    worse: Tensor,
    weights: Tensor | float = 1.0,
    *,
    margins: Tensor | float = 0.0,
    probabilities: Tensor | float = 1.0,
    centring: float = 0.0,
) -> dict[str, Tensor]:
    """`comparison_sums` of the differences of scores [n] fp32. Its loss has c (r_w + r_l)² more,
    with the coefficient c of centring (arXiv 2312.09244). If c is not 0, `centre` is the mean of
    the two scores.
    """
    sums = comparison_sums(better - worse, weights, margins=margins, probabilities=probabilities)
    if centring:
        sums["loss"] = sums["loss"] + centring * (weights * (better + worse).square()).sum()
        sums["centre"] = (weights * (better + worse) / 2).sum()
    return sums
