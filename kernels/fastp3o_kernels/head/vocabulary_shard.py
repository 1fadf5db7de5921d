"""A head whose rows are spread over processes: what these tell each other, a few numbers a token,
none of size V.

n tokens of a span, N tokens, D hidden size, V vocabulary.
"""

from dataclasses import dataclass
from math import inf, nan

import torch
import torch.distributed as dist
from torch import Tensor

from fastp3o_kernels.rows.rows import Rows


@dataclass(frozen=True, eq=False)
class VocabularyShard:
    """The part of a head's rows that this process of a group has. Parts are as torch.chunk cuts
    them: all have `widest` rows, the last one has the rest, and none is empty.

    group: the processes; all call with the same hidden states, labels and further arguments.
    vocabulary: V, the rows of all.
    first: the row of the whole head that is this part's first.
    widest: the most rows that a process has, V over the number of processes rounded up.

    Raises ValueError where a process would have no rows, or a row no process.
    """

    group: "dist.ProcessGroup"
    vocabulary: int
    first: int
    widest: int

    def __post_init__(self) -> None:
        processes = dist.get_world_size(self.group)
        if not (processes - 1) * self.widest < self.vocabulary <= processes * self.widest:
            raise ValueError(
                f"a vocabulary of {self.vocabulary} is not cut into {processes} parts, all with rows, of at most "
                f"{self.widest}"
            )

    @classmethod
    def of(cls, weight: Tensor) -> "VocabularyShard":
        """The part that this process has of a head's weight [V, D], a DTensor whose rows torch has
        cut over a mesh of one dimension: `distribute_tensor(weight, mesh, [Shard(0)])`, or tensor
        parallelism. The Head gets the part itself, `weight.to_local()`. Raises ValueError for any
        other weight.
        """
        from torch.distributed.tensor import DTensor, Shard

        if not isinstance(weight, DTensor):
            raise ValueError(
                f"weight must be a DTensor whose rows are spread over processes, got {type(weight).__name__}"
            )
        mesh = weight.device_mesh
        if weight.dim() != 2 or mesh.ndim != 1 or tuple(weight.placements) != (Shard(0),):
            raise ValueError(
                "weight must be a matrix whose rows alone are cut, over a mesh of one dimension, got shape "
                f"{list(weight.shape)} with placements {list(weight.placements)} over a mesh of {list(mesh.shape)}"
            )
        widest = -(-len(weight) // mesh.size())
        return cls(mesh.get_group(), len(weight), mesh.get_local_rank() * widest, widest)

    @property
    def rows(self) -> int:
        return min(self.widest, self.vocabulary - self.first)

    def whole_logprobs(
        self, rows: Rows, logprobs: Tensor, row_max: Tensor, log_sum: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probs of the labels, row maxima before the temperature and log-sums, [n] each, of
        this part -> of all V. One MAX reduction of [n], and one SUM of [2, n].
        """
        largest = row_max.clone()
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.group)
        below = (row_max - largest) / rows.transform.temperature
        # A part of nothing but -inf has a log-sum of -inf, and NaN for log-probs.
        label_logits = torch.where(log_sum == -inf, -inf, logprobs + log_sum) + below
        own = (rows.labels >= 0) & (rows.labels < self.rows)
        sums = self.summed(
            torch.stack([(log_sum + below).exp(), torch.where(own, label_logits, 0.0)])
        )
        log_sum = sums[0].log()
        # Rounding by several processes may exceed 0, the largest log-prob.
        logprobs = (sums[1] - log_sum).clamp_(max=0.0)
        outside = (rows.labels < -self.first) | (rows.labels >= self.vocabulary - self.first)
        logprobs.masked_fill_(outside, nan).masked_fill_(rows.labels == rows.ignore_index, 0.0)
        return logprobs, torch.where(log_sum.isnan(), nan, largest), log_sum

    def whole_statistics(
        self, entropy: Tensor, mean_logit: Tensor, is_top: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Statistics [n] of this part, by maxima and log-sums over all V -> of all V. One SUM
        reduction of [3, n].
        """
        shares = entropy, mean_logit * (self.rows / self.vocabulary), is_top.to(entropy.dtype)
        entropy, mean_logit, tops = self.summed(torch.stack(shares))
        return entropy, mean_logit, tops > 0

    def summed(self, values: Tensor) -> Tensor:
        """values, in place, over all processes. Of hidden states [N, D], each has the gradient
        through its own rows.
        """
        dist.all_reduce(values, group=self.group)
        return values
