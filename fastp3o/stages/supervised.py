"""The loop that SFT and reward modelling share: shuffled passes over a fixed data set, one loss."""

from collections.abc import Callable
from pathlib import Path

import torch
from accelerate import Accelerator
from datasets import Dataset
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from fastp3o.config import SupervisedConfig
from fastp3o.models.packed_model import PackedModel
from fastp3o.packing.pack import PackedRow, efficiency
from fastp3o.precision import Precision
from fastp3o.stages.setup import share, start_trackers
from fastp3o.training.checkpoints import FINISHED_MODEL, STATE, load_state, save_model, save_state
from fastp3o.training.finite import NotFiniteError
from fastp3o.training.optimizer import Optimization
from fastp3o.training.order import rows_of_step, share_of_process
from fastp3o.training.reporting import Phases, Reporter, peak_memory_gib

Rows = dict[str, list]
Pack = Callable[[Rows], list[PackedRow]]
# The sums of a loss, and of what is reported beside it, over the units that `Size` counts (tokens, pairs).
Sums = Callable[[nn.Module, PackedRow], dict[str, Tensor]]
Size = Callable[[Rows], int]


def train_supervised(
    accelerator: Accelerator,
    config: SupervisedConfig,
    folder: Path,
    *,
    stage: str,
    precision: Precision,
    model: PackedModel,
    tokenizer: PreTrainedTokenizerBase,
    train_data: Dataset,
    eval_data: Dataset | None,
    pack_rows: Pack,
    sums_of: Sums,
    size_of: Size,
) -> None:
    """Minimises sums_of(...)["loss"] / size_of(...) of each batch, one packed row after the other.

    Leaves model, metrics and evaluations in `folder`. Raises NotFiniteError, after saving model and state, when the
    loss or a gradient is not finite.
    """
    share(accelerator, config.batch_size, "batch_size")
    if config.gradient_checkpointing:
        model.recompute_activations()
    steps = -(-config.epochs * len(train_data) // config.batch_size)
    optimization = Optimization(accelerator, model.train(), precision, config, steps)
    model = optimization.model
    done = load_state(accelerator, folder / STATE) if config.resume else 0

    start_trackers(accelerator, config)
    reporter = Reporter(accelerator, folder, stage=stage, first_step=done, steps=steps)
    phase = Phases()

    def evaluate_after(step: int) -> None:
        if eval_data is not None:
            reporter.evaluation(step, evaluate(accelerator, model, eval_data, pack_rows, sums_of, size_of))

    def save_after(step: int, where: Path) -> None:
        save_model(accelerator, model, tokenizer, where)
        save_state(accelerator, folder / STATE, step)

    if not config.resume:
        evaluate_after(0)
    for step in range(done + 1, steps + 1):
        with phase("update"):
            rows = rows_of_step(step - 1, batch_size=config.batch_size, total=len(train_data), seed=config.seed)
            batch = train_data[share_of_process(rows, accelerator)]
            size = accelerator.reduce(torch.tensor(float(size_of(batch)), device=accelerator.device), "mean")
            metrics: dict[str, Tensor] = {}
            packed = pack_rows(batch)
            for number, row in enumerate(packed, 1):
                with optimization.row(last=number == len(packed)):
                    sums = sums_of(model, row.to(accelerator.device))
                    optimization.backward(sums["loss"] / size)
                for name, value in sums.items():
                    metrics[name] = metrics.get(name, 0.0) + value.detach() / size
            metrics = {name: accelerator.reduce(value, "mean") for name, value in metrics.items()}
            losses = tuple(metrics)
            try:
                metrics |= optimization.step(metrics["loss"])
            except NotFiniteError as error:
                save_after(step - 1, folder / f"stopped-in-{step:06}")
                reporter.close()
                raise NotFiniteError(
                    f"step {step}: {error}; model and state before it are saved in {folder}"
                ) from error
        seconds = phase.read()["update"]
        reporter.step(
            step,
            {name: value.item() for name, value in metrics.items()}
            | {"learning_rate": optimization.learning_rate, "peak_memory_gib": peak_memory_gib()}
            | {"epoch": step * config.batch_size / len(train_data), "seconds": seconds}
            | {"packing_efficiency": efficiency(packed, config.tokens_per_row)},
            shown=losses,
        )
        last = step == steps
        if last or (config.eval_every and step % config.eval_every == 0):
            evaluate_after(step)
        if config.save_every and step % config.save_every == 0:
            save_after(step, folder / f"checkpoint-{step:06}")
    save_after(steps, folder / FINISHED_MODEL)
    reporter.close()


@torch.no_grad()
def evaluate(
    accelerator: Accelerator, model: nn.Module, data: Dataset, pack_rows: Pack, sums_of: Sums, size_of: Size
) -> dict[str, float]:
    """Means over held-out data of what `sums_of` gives."""
    batch = data[share_of_process(list(range(len(data))), accelerator)]
    totals: dict[str, Tensor] = {}
    for row in pack_rows(batch):
        with accelerator.autocast():
            for name, value in sums_of(model, row.to(accelerator.device)).items():
                totals[name] = totals.get(name, 0.0) + value
    totals["size"] = torch.tensor(float(size_of(batch)), device=accelerator.device)
    totals = {name: accelerator.reduce(value, "sum") for name, value in totals.items()}
    size = totals.pop("size")
    return {name: (value / size).item() for name, value in totals.items()}
