"""Stage 1, supervised fine-tuning: maximum likelihood of the demonstrations' tokens."""

from typing import Any

from torch import Tensor, nn

from fastp3o.data.loading import Loaded, load_demonstrations
from fastp3o.models.loading import load_policy
from fastp3o.models.packed_model import labeled_logprobs
from fastp3o.objectives.base import LossAndMetrics
from fastp3o.packing.pack import pack
from fastp3o.packing.packed_row import PackedRow
from fastp3o.packing.settings import Packing
from fastp3o.packing.shares import Examples
from fastp3o.runtime.context import Caller
from fastp3o.training.config import SFTConfig
from fastp3o.training.supervised import SupervisedTask, train_supervised


def train(config: SFTConfig, caller: Caller | None = None) -> None:
    """Fine-tunes a causal LM on demonstrations; `loss` is in nats per labeled token."""
    train_supervised(SFT(config), caller)


class SFT(SupervisedTask[PackedRow]):
    """Maximum likelihood; counts labeled tokens."""

    config: SFTConfig
    name = "SFT"
    load_model = staticmethod(load_policy)

    def load_examples(self, *source: Any, **options: Any) -> Loaded:
        return load_demonstrations(
            *source, all_turns=self.config.assistant_turns == "all", **options
        )

    def pack(self, examples: Examples) -> list[PackedRow]:
        responses = [[ids] for ids in examples["response_ids"]]
        packing = Packing(self.config.packing.tokens_per_row)
        return pack(
            examples["prompt_ids"], responses, packing, label_prompts=self.config.train_on_prompt
        )

    def loss(self, model: nn.Module, row: PackedRow, divisor: float | Tensor) -> LossAndMetrics:
        return -labeled_logprobs(model, row).sum() / divisor, {}

    def count(self, row: PackedRow) -> int:
        return len(row.labels)
