"""The loop of supervised training: shuffled passes over a fixed data set, packed rows, one loss."""

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import cache, partial
from typing import Generic, TypeVar, cast

import torch
from datasets import Dataset
from torch import Tensor, nn

from fastp3o.config import SupervisedConfig
from fastp3o.context import Caller, Context
from fastp3o.data import DataReport
from fastp3o.evaluation.evaluate import Evaluation
from fastp3o.models.packed_model import PackedModel
from fastp3o.models.sharding import map_rows_in_lockstep, pad_to_longest_rank
from fastp3o.models.trainable import dropout_on
from fastp3o.packing.pack import efficiency
from fastp3o.packing.packed_row import PackedRow
from fastp3o.stages.models import load_trained
from fastp3o.stages.setup import load_eval_examples, load_examples, make_context
from fastp3o.training.optimizer import Optimizer
from fastp3o.training.order import Examples, examples_of_step, own_part, process_share
from fastp3o.training.reporting import Moment
from fastp3o.training.run import Run, Steps

Row = TypeVar("Row", bound=PackedRow)


class SupervisedTask(ABC, Generic[Row]):
    """A task that a model learns from a data set.

    name: of the stage. load_examples: a loader of `fastp3o.data`. load_model: one of `fastp3o.models.loading`. samples:
    an evaluation next to that of held-out data, if the task has one. Losses are sums over what `count` counts (tokens,
    prompts, pairs), so that a batch's mean does not depend on how it is packed.
    """

    name: str
    config: SupervisedConfig
    load_examples: Callable[..., tuple[Dataset, DataReport]]
    load_model: Callable[..., PackedModel]
    context: Context
    samples: Evaluation | None = None

    def __init__(self, config: SupervisedConfig):
        self.config = config

    def set_up(self, context: Context, model: PackedModel, data: dict[str, Dataset]) -> None:
        """Checks and loads the task's other needs. data: by flag. model: not spread over processes yet."""
        self.context, self.data = context, data

    def complete(self, stop_or_save: Callable[[], None]) -> dict[str, Dataset]:
        """The data with columns that are computed once, before the first step. A long computation calls `stop_or_save`
        now and then: a run that is asked to stop ends there.
        """
        return self.data

    @abstractmethod
    def pack(self, examples: Examples) -> list[Row]:
        """Packed rows of a batch."""

    def prepare(self, model: nn.Module, rows: list[Row], examples: Examples) -> list[Row]:
        """The rows with values that losses need of the whole batch, over all processes."""
        return rows

    @abstractmethod
    def losses(self, model: nn.Module, row: Row) -> dict[str, Tensor]:
        """Sums over a row of the `loss` and of other metrics, 0-d."""

    @abstractmethod
    def count(self, examples: Examples) -> int:
        """Number of tokens, prompts or pairs in a batch, over which its losses are averaged."""

    def prepared_rows(self, model: nn.Module, examples: Examples) -> list[Row]:
        with self.context.accelerator.autocast():
            return self.prepare(model, self.pack(examples), examples)

    @torch.no_grad()
    def evaluate(self, model: nn.Module, data: Dataset) -> dict[str, float]:
        """Metrics of held-out data: means of the losses."""
        batch = data[process_share(list(range(len(data))), self.context.accelerator)]
        rows = self.prepared_rows(model, batch)
        with self.context.accelerator.autocast():
            sums = map_rows_in_lockstep(rows, lambda row: self.losses(model, row.to(self.context.device)))
        return self.means(sums, self.count(batch))

    def means(self, sums: list[dict[str, Tensor]], count: int) -> dict[str, float]:
        """Means over all processes. sums, count: of this process's rows."""
        totals = cast(Tensor, sum(torch.stack([*row.values()]) for row in sums))
        counted = torch.full((1,), float(count), device=self.context.device)
        totals = self.context.accelerator.reduce(torch.cat([totals, counted]), "sum")
        return dict(zip(sums[0], (totals[:-1] / totals[-1]).tolist(), strict=True))


def train_supervised(task: SupervisedTask, caller: Caller | None) -> None:
    """Minimises the mean of task.losses(...)["loss"] over each batch, and leaves model, metrics and evaluations in
    `task.config.output_dir`.

    Raises NotFiniteError, after saving model and state, when the loss or a gradient is not finite.
    """
    config = task.config
    context = make_context(config, "bf16-autocast", caller, batch_size=config.batch_size)
    load = partial(task.load_examples, max_response_tokens=config.max_response_tokens)
    data = {"train_data": load_examples(context, config, load, config.train_data, config.split, config.limit)}
    eval_examples = load_eval_examples(context, config, load, config.eval_data)
    if eval_examples is not None:
        data["eval_data"] = eval_examples
    model = load_trained(config, task.load_model)
    task.set_up(context, model, data)

    total = len(data["train_data"])
    steps = -(-config.epochs * total // config.batch_size)
    optimizer = Optimizer(context.accelerator, model, context.precision, config, steps, mesh=context.mesh)
    run, complete = make_run(task, optimizer, data, steps)
    for step in run:
        chosen = examples_of_step(step - 1, batch_size=config.batch_size, total=total, seed=config.seed)
        with run.saved_after_error(step):
            batch = own_part(context.accelerator, complete()["train_data"][chosen])
        run.stop_or_save()
        begun = Moment(context.device)
        rows = task.prepared_rows(optimizer.model, batch)
        metrics, shown = optimizer_step(task, optimizer, rows, task.count(batch))
        packed = efficiency(rows, config.tokens_per_row)
        known = {"epoch": step * config.batch_size / total, "packing_efficiency": packed}
        tokens = sum(row.tokens for row in rows) * context.accelerator.num_processes
        run.report_later(step, begun, metrics, known, tokens=tokens, shown=shown)


def make_run(
    task: SupervisedTask, optimizer: Optimizer, data: dict[str, Dataset], steps: int
) -> tuple[Run, Callable[[], dict[str, Dataset]]]:
    """Makes the run, and a function for the completed data."""
    complete = cache(lambda: task.complete(this_run.stop_or_save))

    def evaluation() -> dict[str, float]:
        held_out = complete().get("eval_data")
        metrics = {} if held_out is None else task.evaluate(optimizer.model, held_out)
        return metrics | (task.samples() if task.samples else {})

    run = Run(
        task.context,
        task.config,
        optimizer,
        Steps(task.name, "step", steps),
        evaluate=evaluation if "eval_data" in data or task.samples else None,
        data={**data, "eval_prompts": task.samples and task.samples.prompts},
    )
    # The run holds the evaluation. If that held the run, both would stay in memory, with the model.
    this_run = weakref.proxy(run)
    return run, complete


def optimizer_step(
    task: SupervisedTask[Row], optimizer: Optimizer, rows: list[Row], count: int
) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """Makes one step on a batch. Returns metrics over all processes, and the names of those that are the task's own."""
    accelerator, device = task.context.accelerator, task.context.device
    mean_count = accelerator.reduce(torch.full((), float(count), device=device), "mean")
    totals: Tensor | float = 0.0
    for row, counts in pad_to_longest_rank(rows, rows[0]):
        with accelerator.autocast(), dropout_on(optimizer.model):
            losses = task.losses(optimizer.model, row.to(device))
            optimizer.backward(losses["loss"] * counts / mean_count)
        totals = totals + torch.stack([*losses.values()]).detach() * counts / mean_count
    metrics = dict(zip(losses, accelerator.reduce(totals, "mean"), strict=True))
    return metrics | optimizer.step(metrics["loss"]), tuple(metrics)
