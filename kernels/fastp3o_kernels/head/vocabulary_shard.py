"""A head whose rows are spread over processes: what these tell each other, a few numbers a token.

n tokens of a span, V vocabulary.
"""

from dataclasses import dataclass
from math import inf, nan

import torch
import torch.distributed as dist
from torch import Tensor

from fastp3o_kernels.rows.rows import Rows


@dataclass(frozen=True, eq=False)
class VocabularyShard:
    """The part of a head's rows that this process of a group has. All have the same hidden states, labels and further
    arguments. Parts are as torch.chunk cuts them, and none is empty: all have `widest` rows, the last one the rest.

    group: the processes.
    vocabulary: V, the rows of all.
    first: which of them is this part's first one.
    widest: the most rows that a process has.

    Raises ValueError where a process would have no rows.
    """

    group: "dist.ProcessGroup"
    vocabulary: int
    first: int
    widest: int

    def __post_init__(self) -> None:
        processes = dist.get_world_size(self.group)
        if not (processes - 1) * self.widest < self.vocabulary <= processes * self.widest:
            raise ValueError(
                f"{processes} processes with up to {self.widest} rows each must all have rows of a vocabulary of "
                f"{self.vocabulary}, and have all of it"
            )

    @property
    def rows(self) -> int:
        """Rows of this process's part."""
        return min(self.widest, self.vocabulary - self.first)

    def whole_logprobs(
        self, rows: Rows, logprobs: Tensor, row_max: Tensor, log_sum: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probs, row maxima and log-sums [n] over this part -> over the whole vocabulary."""
        V = rows.logits.shape[1]
        largest = row_max.clone()
        dist.all_reduce(largest, dist.ReduceOp.MAX, self.group)
        below = (row_max - largest) / rows.transform.temperature
        # A part of nothing but -inf has a log-sum of -inf.
        label_logits = torch.where(log_sum == -inf, -inf, logprobs + log_sum) + below
        within = (rows.labels >= 0) & (rows.labels < V)
        sums = torch.stack([(log_sum + below).exp(), torch.where(within, label_logits, 0.0)])
        dist.all_reduce(sums, group=self.group)
        log_sum = sums[0].log()
        outside = (rows.labels < -self.first) | (rows.labels >= self.vocabulary - self.first)
        # Terms of different processes are rounded apart.
        logprobs = (sums[1] - log_sum).clamp_(max=0.0).masked_fill_(outside, nan)
        logprobs.masked_fill_(rows.labels == rows.ignore_index, 0.0)
        return logprobs, torch.where(log_sum.isnan(), nan, largest), log_sum

    def whole_statistics(
        self, rows: Rows, entropy: Tensor, mean_logit: Tensor, is_top: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Statistics [n] of this part, by the whole one's maxima and log-sums -> of the whole vocabulary."""
        share = rows.logits.shape[1] / self.vocabulary
        sums = torch.stack([entropy, mean_logit * share, is_top.to(entropy.dtype)])
        dist.all_reduce(sums, group=self.group)
        return sums[0], sums[1], sums[2] > 0

    def sum(self, values: Tensor) -> None:
        """Over all processes, in place."""
        dist.all_reduce(values, group=self.group)
