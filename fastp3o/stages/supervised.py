"""The loop of supervised training: shuffled passes over a fixed data set, packed rows, one loss."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Protocol

import torch
from accelerate import Accelerator
from datasets import Dataset
from torch import Tensor, nn

from fastp3o.config import EVALUATION_FLAGS, StageConfig, option, required
from fastp3o.data import DataReport
from fastp3o.models.loading import load_tokenizer
from fastp3o.models.packed_model import PackedModel
from fastp3o.models.sharding import in_step, passes, process_mesh
from fastp3o.packing.pack import efficiency
from fastp3o.packing.packed_row import PackedRow
from fastp3o.precision import precision_of
from fastp3o.stages.setup import check_divisible, load_data, make_accelerator
from fastp3o.training.optimizer import Optimizer
from fastp3o.training.order import Examples, examples_of_step, own_part, process_share
from fastp3o.training.run import Run
from fastp3o.training.run_folder import check_output_dir


@dataclass(frozen=True, kw_only=True)
class SupervisedConfig(StageConfig):
    """What SFT and reward modelling have in common: passes over a fixed data set."""

    CHANGEABLE: ClassVar[tuple[str, ...]] = ("epochs",)

    train_data: str = required(
        "Training data: a hub name (or name:config), or JSONL or parquet files; several with commas between."
    )
    eval_data: str | None = option(None, "Held-out data of the same layout.")
    max_response_tokens: int = option(512, "Tokens kept of a response; longer ones lose their end and are counted.")
    epochs: int = option(1, "Passes over the training data.")
    batch_size: int = option(32, "Examples of one optimizer step, over all processes.")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_at_least(1, "max_response_tokens", "epochs", "batch_size")
        self.check_alone("eval_data", *EVALUATION_FLAGS)


class SupervisedTask(Protocol):
    """What is learned from a data set.

    name: of the stage. load_examples: a loader of `fastp3o.data`. Losses are sums over the units that `count` counts
    (tokens, pairs), so that a batch's mean does not depend on how it is packed.
    """

    name: str

    @property
    def config(self) -> SupervisedConfig: ...
    @property
    def load_examples(self) -> Callable[..., tuple[Dataset, DataReport]]: ...

    def load_model(self) -> PackedModel:
        """The model that learns."""

    def pack(self, examples: Examples) -> list[PackedRow]:
        """Packed rows of a batch."""

    def losses(self, model: nn.Module, row: PackedRow) -> dict[str, Tensor]:
        """Sums over a row's units of the `loss`, and of what is reported beside it, 0-d."""

    def count(self, examples: Examples) -> int:
        """The units of a batch."""

    def evaluate(self, accelerator: Accelerator, model: nn.Module, data: Dataset) -> dict[str, float]:
        """Metrics of held-out data: `held_out_means`, and what the task has to say beside them."""


def train_supervised(task: SupervisedTask) -> None:
    """Minimises the mean of task.losses(...)["loss"] over each batch, and leaves model, metrics and evaluations in
    `task.config.output_dir`.

    Raises NotFiniteError, after saving model and state, when the loss or a gradient is not finite.
    """
    config = task.config
    precision = precision_of(config.precision, automatic="bf16-autocast")
    accelerator = make_accelerator(config, precision)
    check_divisible(accelerator, config.batch_size, "batch_size")
    check_output_dir(accelerator, config)
    tokenizer = load_tokenizer(config.model, trust_remote_code=config.trust_remote_code)
    examples, eval_examples = load_data(
        accelerator,
        task.load_examples,
        config.train_data,
        config.eval_data,
        tokenizer,
        config,
        max_response_tokens=config.max_response_tokens,
    )
    model = task.load_model().train()
    model.check_reach(config.max_prompt_tokens + config.max_response_tokens)
    if config.gradient_checkpointing:
        model.recompute_activations()

    steps = -(-config.epochs * len(examples) // config.batch_size)
    mesh = process_mesh(accelerator.device, config.shard_size)
    optimizer = Optimizer(accelerator, model, precision, config, steps, mesh=mesh)
    evaluation = None
    if eval_examples is not None:
        evaluation = partial(task.evaluate, accelerator, optimizer.model, eval_examples)
    run = Run(
        accelerator,
        config,
        optimizer,
        tokenizer,
        stage=task.name,
        step_name="step",
        steps=steps,
        evaluate=evaluation,
        data={"train_data": examples, "eval_data": eval_examples},
    )
    for step in run:
        chosen = examples_of_step(step - 1, batch_size=config.batch_size, total=len(examples), seed=config.seed)
        batch = own_part(accelerator, examples[chosen])
        with run.saved_if_not_finite(step), run.phase("update"):
            rows = task.pack(batch)
            metrics, shown = optimizer_step(accelerator, optimizer, task, rows, task.count(batch))
        values = {name: value.item() for name, value in metrics.items()}
        values |= {
            "epoch": step * config.batch_size / len(examples),
            "packing_efficiency": efficiency(rows, config.tokens_per_row),
        }
        tokens = sum(row.tokens for row in rows) * accelerator.num_processes
        run.report(step, values, tokens=tokens, shown=shown)


def optimizer_step(
    accelerator: Accelerator, optimizer: Optimizer, task: SupervisedTask, rows: list[PackedRow], count: int
) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """One step on a batch. Returns metrics over all processes, and the names of those that are the task's own."""
    mean_count = accelerator.reduce(torch.tensor(float(count), device=accelerator.device), "mean")
    metrics: dict[str, Tensor] = {}
    for row, counts in in_step(rows, rows[0]):
        with accelerator.autocast():
            losses = task.losses(optimizer.model, row.to(accelerator.device))
            optimizer.backward(losses["loss"] * counts / mean_count)
        for name, value in losses.items():
            metrics[name] = metrics.get(name, 0.0) + value.detach() * counts / mean_count
    metrics = {name: accelerator.reduce(value, "mean") for name, value in metrics.items()}
    return metrics | optimizer.step(metrics["loss"]), tuple(metrics)


@torch.no_grad()
def held_out_means(accelerator: Accelerator, model: nn.Module, data: Dataset, task: SupervisedTask) -> dict[str, float]:
    """Means over held-out data of what the task's losses are sums of."""
    batch = data[process_share(list(range(len(data))), accelerator)]
    with accelerator.autocast():
        sums = passes(task.pack(batch), lambda row: task.losses(model, row.to(accelerator.device)))
    return means_of(accelerator, sums, task.count(batch))


def means_of(accelerator: Accelerator, sums: list[dict[str, Tensor]], count: int) -> dict[str, float]:
    """sums: of the rows of this process, over its `count` units."""
    totals: dict[str, Tensor] = {}
    for row in sums:
        for name, value in row.items():
            totals[name] = totals.get(name, 0.0) + value
    totals["count"] = torch.tensor(float(count), device=accelerator.device)
    totals = {name: accelerator.reduce(value, "sum") for name, value in totals.items()}
    units = totals.pop("count")
    return {name: (value / units).item() for name, value in totals.items()}
