"""Everything around the steps of a training loop: metrics, evaluations, checkpoints, stopping and
resuming.
"""

import math
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
from datasets import Dataset
from torch import Tensor

from fastp3o.calls.endpoint import EndpointError
from fastp3o.calls.function import FunctionError, FunctionInterruptedError
from fastp3o.calls.users_code import restored
from fastp3o.config import StageConfig
from fastp3o.errors import UserError
from fastp3o.files import clear_leftovers, from_here
from fastp3o.optimizer.optimizer import Optimizer
from fastp3o.run.best import Best
from fastp3o.run.card import Training
from fastp3o.run.checkpoint import NAME, Progress, RunState, States
from fastp3o.run.device_clock import LateNumbers, Moment
from fastp3o.run.fingerprints import run_fingerprints
from fastp3o.run.folder import (
    claim,
    clear_away,
    keep_newest,
    release,
    require_claimed,
    write_config,
)
from fastp3o.run.hang import HangWatch
from fastp3o.run.hub import upload
from fastp3o.run.log import cut_after, sync_logs
from fastp3o.run.manifest import ResumeError, require_same_run
from fastp3o.run.model import save_trained
from fastp3o.run.names import (
    ADAPTER,
    BEST_MODEL,
    EVALUATIONS,
    FINISHED_MODEL,
    METRICS,
    ROLLOUTS,
    STATES,
)
from fastp3o.run.phases import Phases, peak_memory_gib
from fastp3o.run.report import Reporter
from fastp3o.run.signals import StoppedError, Stops
from fastp3o.runtime.context import Callback, Caller, Context
from fastp3o.runtime.finiteness import (
    NotFiniteError,
    largest,
    not_finite,
    not_finite_error,
    require_all_finite,
)
from fastp3o.runtime.precision import wider_precision
from fastp3o.runtime.processes import on_main_process, result_or_error

A_WEIGHT = "a weight"
TOGETHER = ("logprobs", "update")  # phases in which no process works alone for long


class Steps(NamedTuple):
    """The steps of a loop. stage: the progress bar's label. name: of a step, in messages. last:
    number of the last.
    """

    stage: str
    name: str
    last: int


class Run:
    """Iterates over the numbers of a loop's steps, and evaluates and saves between them as the
    configuration says.

    A step is what the loop counts: an update of an online objective, an optimizer step of
    supervised training.

    Args:
        evaluate: gives the metrics of an evaluation; None without evaluation data.
        data: the examples, by the option that names them.
        state: what else goes from step to step and into a state.

    Makes the folder of the run, or continues from the newest state in it. Raises FileExistsError if
    the folder is not this run's, ResumeError if the run would be another than the one it continues
    from, and CorruptStateError if none of its states is whole; all of them leave the folder as it
    was.
    """

    # --- beginning, and the loop over steps -------------------------------------------------------

    def __init__(
        self,
        context: Context,
        config: StageConfig,
        optimizer: Optimizer,
        steps: Steps,
        *,
        evaluate: Callable[[], dict[str, float]] | None,
        data: Mapping[str, Dataset | None],
        state: RunState | None = None,
    ):
        self.accelerator = context.accelerator
        self.tokenizer = context.tokenizer
        self.config = config
        self.optimizer, self.steps, self.evaluate = optimizer, steps, evaluate
        self.on_update, self.on_evaluation = context.caller or Caller()
        self.pending = None if state is None else state.pending
        # From here on no other run may write into the folder, until this one ends or cannot begin.
        self.folder = claim(self.accelerator, config)
        try:
            self.fingerprints = on_main_process(
                self.accelerator, lambda: run_fingerprints(config.values(), data)
            )
            begun = "" if context.clock is None else context.clock.moment.isoformat()
            self.states = States(self.folder / STATES, optimizer, state or RunState(), begun)
            self.progress = self.resumed() or self.states.progress(0, evaluated=False)
            self.optimizer_steps = optimizer.steps
            on_main_process(self.accelerator, self.begin)
            # A loss is best when it is lowest; every other metric when it is highest.
            metric = config.keep_best
            lowest = (config.best_is or config.keep_best) in ("lowest", "loss")
            self.best: Best | None = None
            if metric is not None:
                self.best = on_main_process(
                    self.accelerator, lambda: Best(metric, lowest=lowest, folder=self.folder)
                )
        except BaseException:
            release(self.folder)
            raise
        done = self.progress.step
        self.begin_trackers(done)
        self.reporter = Reporter(
            self.accelerator,
            self.folder,
            stage=steps.stage,
            first_step=done,
            steps=steps.last,
            ends_processes=context.caller is None,
        )
        self.phases = Phases()
        self.stops = Stops(self.accelerator)
        self.hang_watch = HangWatch(config.hang_minutes, context.mesh)
        self.saved_at = time.monotonic()
        self.warned: set[str] = set()
        # Settles the step whose outcome the host has not read.
        self.unread: Callable[[], None] | None = None
        self.last = steps.last  # number of the last step, an earlier one once the run is to end
        self.reported: list[dict[str, Any]] = []  # metrics of steps that no callback has seen yet

    def begin_trackers(self, done: int) -> None:
        """Opens accelerate's trackers, which continue after the steps that are done."""
        trackers: dict[str, dict[str, Any]] = {}
        if done:
            # What a run has logged after the state that it continues from is logged again.
            trackers["tensorboard"] = {"purge_step": done + 1}
        if self.config.run_name is not None:
            trackers |= {
                tracker: {"name": self.config.run_name} for tracker in ("wandb", "trackio")
            }
        self.accelerator.init_trackers("trackers", config=self.config.plain(), init_kwargs=trackers)

    def resumed(self) -> Progress | None:
        """Loads the newest state if there is one, and prints its name and the options that have
        changed.
        """
        if not self.config.resume:
            return None
        # Checked before anything is loaded, so that a refused run leaves everything as it was.
        manifest, lines = self.states.find()
        if manifest is None:
            self.accelerator.print(
                f"--resume: there is no state in {self.states.folder} yet, the run begins"
            )
            return None
        lines += require_same_run(
            manifest, self.config, self.fingerprints, self.accelerator.num_processes
        )
        assert self.states.newest is not None
        if manifest.step > self.steps.last:
            state = f"{from_here(self.states.newest)} is after {self.steps.name} {manifest.step}"
            raise ResumeError(
                f"--resume: {state}, and this run would end at {self.steps.last}: ask for as many"
            )
        progress = self.states.load(manifest)
        for line in [
            *lines,
            f"resuming after {self.steps.name} {manifest.step}, from {from_here(self.states.newest)}",
        ]:
            self.accelerator.print(line)
        return progress

    def begin(self) -> None:
        """Cleans the folder up, after all checks have passed."""
        clear_away(self.folder)
        clear_leftovers(self.states.folder, NAME)
        # Steps after the state are made again, so their lines in the logs go. An evaluation after
        # the state's step is repeated, too, unless the state was saved after it.
        done, evaluated = self.progress.step, self.progress.evaluated
        for name, last in (
            (METRICS, done),
            (ROLLOUTS, done),
            (EVALUATIONS, done if evaluated else done - 1),
        ):
            for line in cut_after(self.folder / name, last):
                self.accelerator.print(line)
        write_config(self.folder, self.config)

    def __iter__(self) -> Iterator[int]:
        with self.stops, self.hang_watch:
            try:
                # Before the first step: the evaluation and the checkpoint that a killed run has not
                # made after its last state.
                self.evaluate_after(self.progress.step)
                step = self.progress.step
                checkpoint = self.checkpoint_after(step)
                if checkpoint and not on_main_process(self.accelerator, checkpoint.exists):
                    self.save_model(checkpoint)
                # `self.last` may come nearer on the way, by early stopping or a callback.
                while step < self.last:
                    step += 1
                    self.hang_watch.step = f"{self.steps.name} {step}"
                    yield step
                    self.hang_watch.at("after it")
                    self.states.place()
                    # A supervised step reports later (`report_later`), and notes its progress then.
                    if self.unread is None:
                        self.require_finite_weights(step)
                        self.note_progress(step, evaluated=False)
                    self.call_back(step)
                    self.stop_or_save()
                    self.evaluate_after(step)
                    if checkpoint := self.checkpoint_after(step):
                        self.read_late_step()
                        self.save_state(wait=False)
                        self.save_model(checkpoint)
                        on_main_process(
                            self.accelerator,
                            lambda: keep_newest(self.folder, self.config.keep_checkpoints),
                        )
                # The state comes before the model: if saving that fails, --resume saves it again.
                self.read_late_step()
                self.call_back(step)
                self.stop_or_save()
                self.save_state()
                self.save_model(self.folder / FINISHED_MODEL)
                # An upload that fails ends the program with an error, but not before all else is
                # written and told.
                address, error = on_main_process(
                    self.accelerator,
                    lambda: result_or_error(partial(upload, self.config.folder, self.config)),
                )
                self.finish(address)
                if error is not None:
                    raise error
            finally:
                if self.pending is not None:
                    self.pending.close()
                # After an error of one process, the others may not come: none waits for them here.
                if self.accelerator.num_processes == 1:
                    self.states.place()
                else:
                    self.states.place_alone()
                release(self.folder)

    def finish(self, address: str | None) -> None:
        """Ends the report, and says where the finished model is. address: on the hub."""
        if self.best is not None:
            self.reporter.print(f"best {self.best}: {from_here(self.folder / BEST_MODEL)}")
        self.reporter.close()
        if address is not None:
            self.accelerator.print(f"the model is at {address}")
        model, adapter = self.folder / FINISHED_MODEL, self.folder / ADAPTER
        self.accelerator.print(f"model: {from_here(model if model.exists() else adapter)}")
        if model.exists() and adapter.exists():
            self.accelerator.print(f"adapter: {from_here(adapter)}")

    # --- within a step ----------------------------------------------------------------------------

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Times a part of a step. Stops or saves before it if that is due and the model has not
        moved in this step.
        """
        self.stop_or_save()
        self.hang_watch.at(name, short=name in TOGETHER)
        with self.phases(name):
            yield

    @contextmanager
    def saved_if_not_finite(self, step: int) -> Iterator[None]:
        """Wraps the work of a step as `saved_after_error`, and waits at its end for its optimizer
        steps.
        """
        with self.saved_after_error(step):
            yield
            self.optimizer.require_finite()

    @contextmanager
    def saved_after_error(self, step: int) -> Iterator[None]:
        """Handles a NotFiniteError, or an error of an endpoint or a user's function: saves the
        model if a step was made, saves the state too if this step has not moved it, and says so in
        the error. A user's function that raised KeyboardInterrupt ends the run as SIGINT does.
        """
        try:
            yield
        except FunctionInterruptedError as error:
            self.stop(signal.SIGINT, str(error))
        except (NotFiniteError, EndpointError, FunctionError) as error:
            self.hang_watch.at("saving")
            self.states.place()
            where = f"{self.steps.name} {step}: {error}{self.overflow(error)}"
            stopped = self.folder / f"stopped-in-{step:06}"
            try:
                self.require_finite_weights(step)
            except NotFiniteError:
                raise NotFiniteError(
                    f"{where}; the weights are already non-finite as well. {self.remedy()}"
                ) from error
            if self.progress.step == 0 and not self.moved:
                # There is nothing that the start does not have.
                self.reporter.close()
                raise type(error)(
                    f"{where}; nothing was trained before that. {self.remedy()}"
                ) from error
            if not self.moved:
                self.save_state()
            self.save_model(stopped / FINISHED_MODEL)
            self.reporter.close()
            raise type(error)(
                f"{where}; the model before that is in {from_here(stopped)}. {self.remedy()}"
            ) from error

    def overflow(self, error: Exception) -> str:
        """The values of the rows that were trained on which overflow fp16, if that explains the
        error; else nothing.
        """
        overflow = self.optimizer.overflow() if isinstance(error, NotFiniteError) else None
        if overflow is None:
            return ""
        return (
            f", since {overflow}: --precision {wider_precision(trains=True).name} has a wider range"
        )

    # --- reports ----------------------------------------------------------------------------------

    def report(
        self,
        step: int,
        metrics: dict[str, float],
        *,
        tokens: float,
        shown: tuple[str, ...],
        seconds: dict[str, float] | None = None,
    ) -> None:
        """Reports a step's metrics, times and memory. tokens: trained on, over all processes.
        shown: the names of the metrics next to the progress bar. seconds: of each phase; None for
        what `phase` has measured.
        """
        seconds = self.phases.read() if seconds is None else seconds
        total = sum(seconds.values())
        metrics = (
            metrics
            | {"learning_rate": metrics.get("learning_rate", self.optimizer.learning_rate)}
            | {
                "peak_memory_gib": peak_memory_gib(),
                "seconds": total,
                "tokens_per_second": tokens / total,
            }
            | {f"seconds_{phase}": value for phase, value in seconds.items()}
        )
        self.reporter.step(step, metrics, shown=shown)
        if self.on_update is not None:
            self.reported.append({"step": step, **metrics})

    def report_later(
        self,
        step: int,
        begun: Moment,
        metrics: dict[str, Tensor],
        host_metrics: dict[str, float],
        *,
        tokens: float,
        shown: tuple[str, ...],
    ) -> None:
        """Ends a step that the device may still be working on: reads the outcome of the step before
        it, and sends its own on the way, which is read after the next step, or before anything is
        saved or evaluated. begun: when its work began. metrics: 0-d, on the device. host_metrics:
        the others.
        """
        # What tells of this step is launched on the device behind its work, so that the host reads
        # it later without waiting for the steps after it.
        self.read_late_step()
        outcome, progress = self.optimizer.outcome(), self.states.progress(step, evaluated=False)
        steps, learning_rate = self.optimizer.steps, self.optimizer.learning_rate
        bad = not_finite(
            self.accelerator, largest(self.accelerator, self.trained_weights())
        ).float()
        late = LateNumbers(torch.cat([torch.stack([bad, *metrics.values()]), outcome]))

        def settle() -> None:
            bad, *numbers = late.read()
            with self.saved_after_error(step):
                self.optimizer.settle(steps, numbers[len(metrics) :])
            values = (
                dict(zip(metrics, numbers, strict=False))
                | host_metrics
                | {"learning_rate": learning_rate}
            )
            self.report(
                step,
                values,
                tokens=tokens,
                shown=shown,
                seconds={"update": late.seconds_since(begun)},
            )
            if bad:
                raise self.ruined(step, not_finite_error(A_WEIGHT, int(bad)))
            self.progress, self.optimizer_steps = self.states.with_loss_scale(progress), steps

        self.unread = settle

    def read_late_step(self) -> None:
        """Reports the step whose outcome the host has not read yet, and notes its progress, if
        there is one. Raises NotFiniteError as `saved_if_not_finite` and `require_finite_weights`
        do. The model is then the one before that step, also where a later one was launched.
        """
        settle, self.unread = self.unread, None
        if settle is not None:
            settle()

    def warn_once(self, about: str, message: str) -> None:
        if about not in self.warned:
            self.reporter.print(message)
        self.warned.add(about)

    # --- evaluations and callbacks ----------------------------------------------------------------

    def evaluate_after(self, step: int) -> None:
        """Makes the evaluation if it is due and was not made before the run was resumed."""
        due = step == 0 or self.config.evaluates_after(step, last=self.last)
        if self.evaluate is None or not due:
            return
        self.read_late_step()
        self.call_back(step)
        if not self.progress.evaluated:
            self.hang_watch.at("evaluation")
            with self.saved_if_not_finite(step):
                metrics = self.evaluate()
                for name, value in metrics.items():
                    # A part of a sum, `reward/part`, may have weight 0; any other makes the sum
                    # NaN, too.
                    if "/" not in name and not math.isfinite(value):
                        raise NotFiniteError(f"{name} of the evaluation is NaN or infinite")
            self.reporter.evaluation(step, metrics)
            if self.best is not None and self.best.improves(step, metrics):
                self.save_model(self.folder / BEST_MODEL, self.best.file)
            # Only noted here: a step without one may be the last of a resumed run, and then one is
            # due.
            self.note_progress(step, evaluated=True)
            if self.on_evaluation is not None:
                self.end_if_asked(self.on_evaluation, step, {"step": step, **metrics})
        if self.best is not None and 0 < self.config.early_stopping <= self.best.since:
            self.reporter.print(
                f"--early_stopping: no evaluation since was better than {self.best}"
            )
            self.last = step

    def call_back(self, step: int) -> None:
        """Shows `on_update` the metrics that it has not seen. The run ends after `step` if it asks
        for that.
        """
        reported, self.reported = self.reported, []
        for metrics in reported:
            assert self.on_update is not None
            self.end_if_asked(self.on_update, step, metrics)

    def end_if_asked(self, callback: Callback, step: int, metrics: dict[str, Any]) -> None:
        """The run ends after `step` if the callback returns True. Saves the state if it raises
        anything at all, such as sys.exit's, or returns neither True, False nor None, so that the
        run can continue. The working directory is as before it.
        """

        def asked() -> tuple[bool, BaseException | None]:
            try:
                with restored():
                    answer = callback(metrics)
                if not isinstance(answer, bool | np.bool_ | None):
                    raise UserError(
                        f"a callback must return True, to end the run, False or None, got {answer!r:.80}"
                    )
                return bool(answer), None
            except BaseException as error:
                return False, error

        ends, error = on_main_process(self.accelerator, asked)
        if error is not None:
            self.read_late_step()
            self.save_state()
            self.reporter.close()
            raise error
        if ends:
            self.reporter.print(f"the callback has ended the run after {self.steps.name} {step}")
            self.last = step

    # --- weights that are not finite --------------------------------------------------------------

    def require_finite_weights(self, step: int) -> None:
        """Raises NotFiniteError if the step has ruined the model, before a state can replace a good
        one.
        """
        try:
            require_all_finite(self.accelerator, A_WEIGHT, self.trained_weights())
        except NotFiniteError as error:
            raise self.ruined(step, error) from error

    def trained_weights(self) -> Iterator[Tensor]:
        return (
            parameter for parameter in self.optimizer.model.parameters() if parameter.requires_grad
        )

    def ruined(self, step: int, error: NotFiniteError) -> NotFiniteError:
        return NotFiniteError(
            f"{self.steps.name} {step}: {error} after its optimizer step. {self.remedy()}"
        )

    def remedy(self) -> str:
        if self.states.newest is None:
            return "No state was saved before it: --resume starts over"
        return f"The last good state is {from_here(self.states.newest)}: --resume continues from it"

    # --- stopping and saving ----------------------------------------------------------------------

    def note_progress(self, step: int, *, evaluated: bool) -> None:
        self.progress = self.states.progress(step, evaluated=evaluated)
        self.optimizer_steps = self.optimizer.steps

    @property
    def moved(self) -> bool:
        """Whether the optimizer has made a step since progress was noted. If so, no state can be
        saved.
        """
        return self.optimizer.steps != self.optimizer_steps

    def stop_or_save(self) -> None:
        """Saves the state if that is due, and places one that all have written. After a signal,
        saves it and ends the run.
        """
        # The main process's clock and any process's signal decide for all, in one exchange.
        waited = self.accelerator.is_main_process and time.monotonic() - self.saved_at
        due = bool(self.config.save_minutes and waited > self.config.save_minutes * 60)
        number, due, written = self.stops.agreed(due, self.states.part_is_written)
        if written:
            self.states.place()
        if not (number or due):
            return
        self.read_late_step()
        if self.moved:
            return
        if number:
            self.stop(number, signal.Signals(number).name)
        self.save_state(wait=False)

    def stop(self, number: int, why: str) -> NoReturn:
        """Saves the state and ends the run as after the signal with this number."""
        self.save_state()
        self.reporter.close()
        place = f"{why}: stopped after {self.steps.name} {self.progress.step}"
        self.accelerator.print(f"{place}; --resume continues from there")
        raise StoppedError(number, place)

    def save_state(self, *, wait: bool = True) -> None:
        """Writes the state of the noted progress, after syncing the logs; without `wait` it is
        placed as soon as all processes have written it, a step later at most.
        """
        # Logs are on the disk before the state that counts on them.
        self.hang_watch.at("saving")
        assert not self.moved
        on_main_process(self.accelerator, lambda: require_claimed(self.folder))
        on_main_process(self.accelerator, lambda: sync_logs(self.folder))
        self.states.save(self.progress, self.config.plain(), self.fingerprints)
        if wait:
            self.states.place()
        self.saved_at = time.monotonic()
        self.stops.exchange = None  # a stop that is handled now is not handled again

    def checkpoint_after(self, step: int) -> Path | None:
        """The folder of the checkpoint that is due after a step; None without one."""
        period = self.config.save_every
        return (
            self.folder / f"checkpoint-{step:06}"
            if step and period and step % period == 0
            else None
        )

    def save_model(self, folder: Path, files: Mapping[str, str] = MappingProxyType({})) -> None:
        """files: texts that go with it, by name."""
        self.hang_watch.at("saving")
        precision, evaluations = self.optimizer.precision.name, self.folder / EVALUATIONS
        step = self.progress.step
        training = Training(
            self.config, self.steps.stage, step, self.steps.last, precision, evaluations
        )
        save_trained(self.optimizer, self.tokenizer, folder, training, self.config.lora_save, files)
