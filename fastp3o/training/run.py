"""What goes on around the steps of a training loop: metrics, evaluations, checkpoints; how it stops and resumes."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from accelerate import Accelerator
from transformers import PreTrainedTokenizerBase

from fastp3o.config import StageConfig
from fastp3o.training.checkpoints import FINISHED_MODEL, STATE, load_state, save_model, save_state
from fastp3o.training.finite import NotFiniteError
from fastp3o.training.optimizer import Optimizer
from fastp3o.training.reporting import Phases, Reporter, peak_memory_gib


class Run:
    """Iterates over the numbers of a loop's steps, and evaluates and saves between them as the configuration says.

    A step is what the loop counts: an update of an online objective, an optimizer step of supervised training.

    Args:
        stage: name of what trains, for the progress bar. step_name: what a step is called in messages.
        steps: the number of the last one.
        evaluate: gives the metrics of an evaluation; None where there is no evaluation data.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        config: StageConfig,
        optimizer: Optimizer,
        tokenizer: PreTrainedTokenizerBase,
        *,
        stage: str,
        step_name: str,
        steps: int,
        evaluate: Callable[[], dict[str, float]] | None,
    ):
        self.accelerator, self.config, self.optimizer, self.tokenizer = accelerator, config, optimizer, tokenizer
        self.step_name, self.steps, self.evaluate = step_name, steps, evaluate
        self.folder = Path(config.output_dir)
        self.done = load_state(accelerator, optimizer, self.folder / STATE) if config.resume else 0
        plain = {name: value for name, value in vars(config).items() if isinstance(value, int | float | str | bool)}
        accelerator.init_trackers("trackers", config=plain)
        self.reporter = Reporter(accelerator, self.folder, stage=stage, first_step=self.done, steps=steps)
        self.phase = Phases()
        self.warned: set[str] = set()

    def __iter__(self) -> Iterator[int]:
        if not self.config.resume:
            self.evaluate_after(0)
        for step in range(self.done + 1, self.steps + 1):
            yield step
            if self.config.evaluates_after(step, last=self.steps):
                self.evaluate_after(step)
            if self.config.save_every and step % self.config.save_every == 0:
                self.save(step, self.folder / f"checkpoint-{step:06}")
        self.save(self.steps, self.folder / FINISHED_MODEL)
        self.reporter.close()

    @contextmanager
    def saved_if_not_finite(self, step: int) -> Iterator[None]:
        """Around the work of a step. Saves the model before it lets a NotFiniteError through, which then says where."""
        steps_before = self.optimizer.steps
        try:
            yield
        except NotFiniteError as error:
            stopped = self.folder / f"stopped-in-{step:06}"
            # Between the optimizer steps of an update there is no state that --resume could continue exactly.
            resumable = self.optimizer.steps == steps_before
            self.save(step - 1, stopped / FINISHED_MODEL, self.folder / STATE if resumable else stopped / STATE)
            self.reporter.close()
            raise NotFiniteError(f"{self.step_name} {step}: {error}; the model before that is in {stopped}") from error

    def report(self, step: int, metrics: dict[str, float], *, tokens: float, shown: tuple[str, ...]) -> None:
        """Files a step's metrics, with its times and memory. tokens: trained on, over all processes. shown: beside the
        progress bar.
        """
        seconds = self.phase.read()
        total = sum(seconds.values())
        self.reporter.step(
            step,
            metrics
            | {"learning_rate": self.optimizer.learning_rate, "peak_memory_gib": peak_memory_gib()}
            | {"seconds": total, "tokens_per_second": tokens / total}
            | {f"seconds_{phase}": value for phase, value in seconds.items()},
            shown=shown,
        )

    def warn_once(self, about: str, message: str) -> None:
        if about not in self.warned:
            self.reporter.print(message)
        self.warned.add(about)

    def evaluate_after(self, step: int) -> None:
        if self.evaluate is not None:
            self.reporter.evaluation(step, self.evaluate())

    def save(self, step: int, model: Path, state: Path | None = None) -> None:
        """Writes the model, and the state after `step` (by default where --resume looks for it)."""
        save_model(self.accelerator, self.optimizer.model, self.tokenizer, model, self.optimizer.precision.weights)
        save_state(self.accelerator, self.optimizer, state or self.folder / STATE, step)
