"""The loop of supervised training: shuffled passes over a fixed data set, packed rows, one loss."""

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Generic, TypeVar

import torch
from datasets import Dataset
from torch import Tensor, nn

from fastp3o.config import SupervisedConfig
from fastp3o.data.loading import DataReport
from fastp3o.evaluation.evaluate import Evaluation
from fastp3o.models.ends import checkpoint_ends
from fastp3o.models.packed_model import PackedModel
from fastp3o.models.sharding import map_rows_in_lockstep, pad_to_longest_rank
from fastp3o.objectives.base import LossAndMetrics, with_count
from fastp3o.optimizer.optimizer import Optimizer
from fastp3o.packing.pack import efficiency
from fastp3o.packing.packed_row import PackedRow
from fastp3o.packing.seeds import examples_of_step
from fastp3o.packing.shares import Examples, own_part
from fastp3o.run.device_clock import Moment
from fastp3o.run.run import Run, Steps
from fastp3o.runtime.context import Caller, Context
from fastp3o.training.build import load_trained
from fastp3o.training.microbatches import MetricSums, Passes, add_gradients, mean_over_steps
from fastp3o.training.setup import load_examples, load_held_out, make_context

Row = TypeVar("Row", bound=PackedRow)


class SupervisedTask(ABC, Generic[Row]):
    """A task that a model learns from a data set. name: of the stage. load_examples: a loader of
    `fastp3o.data`. load_model: one of `fastp3o.models.loading`. samples: an evaluation next to that
    of held-out data, if the task has one. Losses are means over what `count` counts (tokens,
    prompts, pairs) in a batch, however it is packed.
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
        """Checks and loads the task's other needs. data: by flag. model: not spread over processes
        yet.
        """
        self.context, self.data = context, data

    def complete(self, stop_or_save: Callable[[], None]) -> dict[str, Dataset]:
        """The data with columns that are computed once, before the first step. A long computation
        calls `stop_or_save` now and then: a run that is asked to stop ends there.
        """
        return self.data

    @abstractmethod
    def pack(self, examples: Examples) -> list[Row]:
        """Packed rows of a batch."""

    def prepare(self, model: nn.Module, rows: list[Row], examples: Examples) -> list[Row]:
        """The rows with values that losses need of the whole batch, over all processes."""
        return rows

    @abstractmethod
    def loss(self, model: nn.Module, row: Row, divisor: float | Tensor) -> LossAndMetrics:
        """The loss of a row, summed and divided by the divisor."""

    def loss_on_device(self, model: nn.Module, row: Row, divisor: float | Tensor) -> LossAndMetrics:
        """The loss of a row that may still be on the CPU."""
        return self.loss(model, row.to(self.context.device), divisor)

    @abstractmethod
    def count(self, row: Row) -> int:
        """Number of tokens, prompts or pairs in a row, over which the losses of a batch are
        averaged.
        """

    def prepared_rows(self, model: nn.Module, examples: Examples) -> list[Row]:
        with self.context.accelerator.autocast():
            return self.prepare(model, self.pack(examples), examples)

    @torch.no_grad()
    def evaluate(self, model: nn.Module, data: Dataset) -> dict[str, float]:
        """Metrics of held-out data: means of the losses."""
        batch = data[self.context.share.numbers(len(data))]
        rows = self.prepared_rows(model, batch)
        with self.context.accelerator.autocast():
            losses = map_rows_in_lockstep(rows, lambda row: self.loss_on_device(model, row, 1.0))
        return self.means(rows, losses)

    def evaluate_sets(
        self, model: nn.Module, data: Dataset, sets: Mapping[str, range]
    ) -> dict[str, float]:
        """Metrics of each set's part of held-out data, with its name, and of all."""
        metrics: dict[str, float] = {}
        for name, places in sets.items():
            of_set = self.evaluate(model, data.select(places))
            metrics |= {f"set/{name}/{metric}": value for metric, value in of_set.items()}
        return metrics | self.evaluate(model, data)

    def means(self, rows: list[Row], losses: list[LossAndMetrics]) -> dict[str, float]:
        """Means over all processes of the losses, with a divisor of 1, and metrics of this
        process's rows.
        """
        sums = MetricSums()
        for row, (loss, metrics) in zip(rows, losses, strict=True):
            summed_loss = with_count({"loss": loss}, self.count(row))
            sums.add(summed_loss | metrics)
        means = mean_over_steps(self.context.accelerator, [sums.read()])
        # The host waits for the device once.
        values = torch.stack([*means.values()]).tolist()
        return dict(zip(means, values, strict=True))


def load_data(
    task: SupervisedTask, context: Context
) -> tuple[dict[str, Dataset], dict[str, range]]:
    """The data by flag, and the places of each held-out set in those of all."""
    config = task.config
    ends = checkpoint_ends(
        config.model_source, context.tokenizer, trust_remote_code=config.trust_remote_code
    )
    load = partial(task.load_examples, max_response_tokens=config.max_response_tokens, ends=ends)
    data = {
        "train_data": load_examples(
            context, config, load, config.train_data, config.split, config.limit
        )
    }
    examples, sets = load_held_out(context, config, load, config.eval_data)
    if examples is not None:
        data["eval_data"] = examples
    return data, sets


def train_supervised(task: SupervisedTask, caller: Caller | None) -> None:
    """Minimizes the mean of the task's loss over each batch, and leaves model, metrics and
    evaluations in `task.config.output_dir`. Raises NotFiniteError, after saving model and state, if
    loss or gradients are not finite.
    """
    # Data come before the model, so that an error in them is reported within seconds.
    config = task.config
    context = make_context(config, "bf16-autocast", caller, batch_size=config.batch_size)
    data, sets = load_data(task, context)
    model, context, config = load_trained(context, config, task.load_model)
    task.config = config  # whose rows are as long as memory holds
    task.set_up(context, model, data)

    total = len(data["train_data"])
    steps = -(-config.epochs * total // config.batch_size)
    optimizer = Optimizer(
        context.accelerator, model, context.precision, config, steps, mesh=context.mesh
    )
    # Columns that take long to compute, such as a reference's log-probs, are computed once there is
    # a run that can be stopped meanwhile.
    complete = cache(lambda: task.complete(this_run.stop_or_save))

    def evaluation() -> dict[str, float]:
        held_out = complete().get("eval_data")
        of_data = {} if held_out is None else task.evaluate_sets(optimizer.model, held_out, sets)
        return of_data | (task.samples() if task.samples else {})

    run = Run(
        context,
        config,
        optimizer,
        Steps(task.name, "step", steps),
        evaluate=evaluation if "eval_data" in data or task.samples else None,
        data={**data, "eval_prompts": task.samples and task.samples.prompts},
    )
    # The run holds the evaluation. If that held the run, both would stay in memory, with the model.
    this_run = weakref.proxy(run)

    for step in run:
        # 1. The step's examples, which follow from seed and number, and this process's part of
        #    them.
        chosen = examples_of_step(
            step - 1, batch_size=config.batch_size, total=total, seed=config.seed
        )
        with run.saved_after_error(step):
            batch = own_part(context.share, complete()["train_data"][chosen])
        # The model has not moved in this step yet, so a state can be saved.
        run.stop_or_save()
        run.hang_watch.at("update", short=True)
        begun = Moment(context.device)

        # 2. Packed rows. If fp16 overflows later, these rows tell where.
        rows = task.prepared_rows(optimizer.model, batch)
        optimizer.recent.extend(rows)

        # 3. The step.
        metrics = make_step(task, optimizer, rows)

        # 4. The report, which is written while the device computes the next step: the host does not
        #    wait for this one.
        shown = tuple(name for name in metrics if name not in ("grad_norm", "loss_scale"))
        packed = efficiency(rows, config.packing.tokens_per_row)
        host_metrics = {"epoch": step * config.batch_size / total, "packing_efficiency": packed}
        tokens = sum(row.tokens for row in rows) * context.share.count
        run.report_later(step, begun, metrics, host_metrics, tokens=tokens, shown=shown)


def make_step(task: SupervisedTask, optimizer: Optimizer, rows: list) -> dict[str, Tensor]:
    """Makes an optimizer step on the mean loss over what all processes count. Returns its metrics,
    0-d.
    """
    accelerator = task.context.accelerator
    count = torch.full((), float(sum(map(task.count, rows))), device=task.context.device)
    # Each process makes as many passes as the one with most rows, since all gather sharded weights.
    passes = Passes(pad_to_longest_rank(rows, rows[0]), accelerator.reduce(count, "mean"))
    gradients = add_gradients(optimizer, passes, task.loss_on_device)
    return mean_over_steps(accelerator, [gradients | optimizer.step(gradients["loss"])])
