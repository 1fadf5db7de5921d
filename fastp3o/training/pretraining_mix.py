"""A pretraining mix (Ouyang et al. 2022, "PPO-ptx"): each optimizer step also raises the likelihood
of given texts.
"""

from dataclasses import dataclass

import torch
from datasets import Dataset
from torch import Tensor, nn

from fastp3o.models.packed_model import labeled_logprobs
from fastp3o.models.sharding import pad_to_longest_rank
from fastp3o.objectives.base import LossAndMetrics, with_count
from fastp3o.objectives.config.base import PretrainingMixConfig
from fastp3o.optimizer.optimizer import Optimizer
from fastp3o.packing.pack import pack
from fastp3o.packing.packed_row import PackedRow
from fastp3o.packing.seeds import derived_seed, examples_of_step
from fastp3o.packing.settings import Packing
from fastp3o.packing.shares import own_part
from fastp3o.training.microbatches import Passes, add_gradients

TEXTS = 2**32 - 2  # part of the seed, so that texts have another order than prompts


@dataclass(frozen=True)
class PretrainingMix:
    """Adds −ptx_coef · the mean of log π over the tokens of a batch of texts, including prompts, to
    each step's loss. texts: has the columns `prompt_ids` and `response_ids`.
    """

    optimizer: Optimizer
    config: PretrainingMixConfig
    seed: int
    packing: Packing
    texts: Dataset

    def __call__(self) -> dict[str, Tensor]:
        """Makes the backward passes for the next step. Returns `ptx_loss`, in nats per token."""
        accelerator, config = self.optimizer.accelerator, self.config
        step, seed = self.optimizer.schedule.last_epoch, derived_seed(self.seed, TEXTS)
        chosen = examples_of_step(
            step, batch_size=config.ptx_batch_size, total=len(self.texts), seed=seed
        )
        texts = own_part(self.optimizer.share, self.texts[chosen])
        responses = [[ids] for ids in texts["response_ids"]]
        rows = pack(texts["prompt_ids"], responses, self.packing, label_prompts=True)
        tokens = torch.full(
            (), float(sum(len(row.labels) for row in rows)), device=accelerator.device
        )
        passes = Passes(pad_to_longest_rank(rows, rows[0]), accelerator.reduce(tokens, "mean"))
        return {"ptx_loss": add_gradients(self.optimizer, passes, self.loss)["ptx_loss"]}

    def loss(self, model: nn.Module, row: PackedRow, divisor: float | Tensor) -> LossAndMetrics:
        nats = -labeled_logprobs(model, row.to(self.optimizer.accelerator.device)).sum()
        return self.config.ptx_coef * nats / divisor, with_count(
            {"ptx_loss": nats}, len(row.labels)
        )
