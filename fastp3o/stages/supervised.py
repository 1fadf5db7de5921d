"""The loop of supervised training: shuffled passes over a fixed data set, packed rows, one loss."""

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import cache
from typing import Generic, TypeVar

import torch
from accelerate import Accelerator
from datasets import Dataset
from torch import Tensor, nn

from fastp3o.config import SupervisedConfig
from fastp3o.data import DataReport
from fastp3o.evaluation.evaluate import Evaluation
from fastp3o.models.loading import load_tokenizer
from fastp3o.models.packed_model import PackedModel
from fastp3o.models.sharding import in_step, passes, process_mesh
from fastp3o.packing.pack import efficiency
from fastp3o.packing.packed_row import PackedRow
from fastp3o.precision import precision_of
from fastp3o.stages.setup import Setting, check_divisible, load_data, make_accelerator
from fastp3o.training.optimizer import Optimizer
from fastp3o.training.order import Examples, examples_of_step, own_part, process_share
from fastp3o.training.run import Run
from fastp3o.training.run_folder import check_output_dir

Row = TypeVar("Row", bound=PackedRow)


class SupervisedTask(ABC, Generic[Row]):
    """What is learned from a data set.

    name: of the stage. load_examples: a loader of `fastp3o.data`. samples: an evaluation beside that of held-out data,
    for a task that has one. Losses are sums over the units that `count` counts (tokens, pairs), so that a batch's mean
    does not depend on how it is packed.
    """

    name: str
    config: SupervisedConfig
    load_examples: Callable[..., tuple[Dataset, DataReport]]
    samples: Evaluation | None = None

    @abstractmethod
    def load_model(self) -> PackedModel:
        """The model that learns."""

    def set_up(self, setting: Setting, data: dict[str, Dataset]) -> None:
        """Checks and loads what the task has beside the model and the data, which are given by the option that names
        them; the model is not spread over processes yet.
        """
        self.data = data

    def complete(self, stop_or_save: Callable[[], None]) -> dict[str, Dataset]:
        """The data with what is computed of all examples once, before the first step; a run that is asked to stop does
        so in `stop_or_save`, which is for calling every now and then.
        """
        return self.data

    @abstractmethod
    def pack(self, examples: Examples) -> list[Row]:
        """Packed rows of a batch."""

    def prepare(self, accelerator: Accelerator, model: nn.Module, rows: list[Row], examples: Examples) -> list[Row]:
        """Rows with what losses take of the whole batch, over all processes."""
        return rows

    @abstractmethod
    def losses(self, model: nn.Module, row: Row) -> dict[str, Tensor]:
        """Sums over a row's units of the `loss`, and of what is reported beside it, 0-d."""

    @abstractmethod
    def count(self, examples: Examples) -> int:
        """The units of a batch."""

    def evaluate(self, accelerator: Accelerator, model: nn.Module, data: Dataset) -> dict[str, float]:
        """Metrics of held-out data: means of the losses, and what a task has to say beside them."""
        return held_out_means(accelerator, model, data, self)


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
    data = {"train_data": examples} | ({} if eval_examples is None else {"eval_data": eval_examples})
    model = task.load_model().train()
    model.check_reach(config.max_prompt_tokens + config.max_response_tokens)
    if config.gradient_checkpointing:
        model.recompute_activations()
    mesh = process_mesh(accelerator.device, config.shard_size)
    task.set_up(Setting(accelerator, precision, tokenizer, model, mesh), data)

    steps = -(-config.epochs * len(examples) // config.batch_size)
    optimizer = Optimizer(accelerator, model, precision, config, steps, mesh=mesh)
    complete = cache(lambda: task.complete(this_run.stop_or_save))

    def evaluation() -> dict[str, float]:
        held_out = complete().get("eval_data")
        metrics = {} if held_out is None else task.evaluate(accelerator, optimizer.model, held_out)
        return metrics | (task.samples() if task.samples else {})

    run = Run(
        accelerator,
        config,
        optimizer,
        tokenizer,
        stage=task.name,
        step_name="step",
        steps=steps,
        evaluate=evaluation if eval_examples is not None or task.samples else None,
        data={**data, "eval_prompts": task.samples and task.samples.prompts},
    )
    # The run holds the evaluation, which completes the data: held by that in turn, it would stay, with its model.
    this_run = weakref.proxy(run)
    for step in run:
        chosen = examples_of_step(step - 1, batch_size=config.batch_size, total=len(examples), seed=config.seed)
        with run.saved_if_not_finite(step):
            batch = own_part(accelerator, complete()["train_data"][chosen])
            with run.phase("update"):
                rows = prepared_rows(accelerator, optimizer.model, task, batch)
                metrics, shown = optimizer_step(accelerator, optimizer, task, rows, task.count(batch))
        values = {name: value.item() for name, value in metrics.items()}
        values |= {
            "epoch": step * config.batch_size / len(examples),
            "packing_efficiency": efficiency(rows, config.tokens_per_row),
        }
        tokens = sum(row.tokens for row in rows) * accelerator.num_processes
        run.report(step, values, tokens=tokens, shown=shown)


def prepared_rows(
    accelerator: Accelerator, model: nn.Module, task: SupervisedTask[Row], examples: Examples
) -> list[Row]:
    with accelerator.autocast():
        return task.prepare(accelerator, model, task.pack(examples), examples)


def optimizer_step(
    accelerator: Accelerator, optimizer: Optimizer, task: SupervisedTask[Row], rows: list[Row], count: int
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
    rows = prepared_rows(accelerator, model, task, batch)
    with accelerator.autocast():
        sums = passes(rows, lambda row: task.losses(model, row.to(accelerator.device)))
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
