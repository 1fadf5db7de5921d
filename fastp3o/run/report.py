"""Reports a run: logs, accelerate's trackers, a progress bar or lines, tables of samples, and a
plot.
"""

import json
import os
import shutil
import sys
import textwrap
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TextIO

from accelerate import Accelerator
from rich.console import Console
from rich.table import Table
from rich.text import Text
from tqdm import auto, tqdm

from fastp3o.errors import visible
from fastp3o.files import from_here
from fastp3o.run import log
from fastp3o.run.folder import require_claimed
from fastp3o.run.log import LoggedGroup, prompt_end
from fastp3o.run.names import EVALUATIONS, METRICS, PROGRESS, ROLLOUTS
from fastp3o.run.plot import draw_progress

# Off a terminal, a run prints about this many lines, and more if they would be further apart than
# this.
LINES, SECONDS_BETWEEN_LINES = 20, 60.0
# Drawing the plot at evaluations takes at most this part of a run's time.
DRAWING_SHARE = 0.02
IN_NOTEBOOK = "ipykernel" in sys.modules


# tqdm's own lock is shared by forks: one that is killed while it prints would stop the run for
# ever.
tqdm.set_lock(threading.RLock())


class Reporter:
    """Writes one line a step to metrics.jsonl and one an evaluation to eval.jsonl, from the main
    process only. ends_processes: whether their group is destroyed at the end.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        folder: Path,
        *,
        stage: str,
        first_step: int,
        steps: int,
        ends_processes: bool = True,
    ):
        self.accelerator, self.folder, self.stage, self.steps = accelerator, folder, stage, steps
        # None: on terminals only. In a log file every redrawing would be a line; a notebook has a
        # bar of its own.
        by_stream = has_no_width(sys.stderr) or None
        disable = (False if IN_NOTEBOOK else by_stream) if accelerator.is_main_process else True
        self.bar = auto.tqdm(
            total=steps, initial=first_step, desc=stage, unit="step", disable=disable
        )
        self.ends_processes = ends_processes
        self.printed_at = time.monotonic()
        self.next_drawing = 0.0  # by the same clock
        self.unprinted = ""  # the line of the last step, if it was not printed

    def step(self, step: int, metrics: dict[str, float], shown: tuple[str, ...]) -> None:
        """shown: names of the metrics next to the progress bar, or in the lines that replace it."""
        self.write(METRICS, step, metrics)
        self.accelerator.log({f"train/{name}": value for name, value in metrics.items()}, step=step)
        self.bar.set_postfix({name: f"{metrics[name]:.3g}" for name in shown}, refresh=False)
        self.bar.update(1)
        values = ", ".join(f"{name} {metrics[name]:.4g}" for name in shown)
        self.unprinted = f"{self.stage} {step}/{self.steps}: {values}"
        waited = time.monotonic() - self.printed_at
        if self.bar.disable and (
            step % -(-self.steps // LINES) == 0 or waited > SECONDS_BETWEEN_LINES
        ):
            self.print_last_step()

    def print_last_step(self) -> None:
        """Prints the metrics of the last step, once."""
        if self.unprinted:
            self.print(self.unprinted)
        self.printed_at, self.unprinted = time.monotonic(), ""

    def evaluation(self, step: int, metrics: dict[str, float]) -> None:
        self.write(EVALUATIONS, step, metrics)
        self.accelerator.log({f"eval/{name}": value for name, value in metrics.items()}, step=step)
        self.print(within_terminal(f"after step {step}: {with_deviations(metrics)}"))
        if step and self.accelerator.is_main_process and time.monotonic() >= self.next_drawing:
            start = time.monotonic()
            self.draw()
            self.next_drawing = time.monotonic() + (time.monotonic() - start) / DRAWING_SHARE

    def write(self, name: str, step: int, metrics: dict[str, float]) -> None:
        if self.accelerator.is_main_process:
            require_claimed(self.folder)
            values = {name: log.finite_or_none(value) for name, value in metrics.items()}
            log.append(self.folder / name, [{"step": step, **values}])

    def rollouts(self, step: int, groups: list[LoggedGroup]) -> None:
        """Logs groups of an update, in the file and in tables of the trackers that have any."""
        if not self.accelerator.is_main_process:
            return
        log.append(self.folder / ROLLOUTS, map(asdict, groups))
        name, parts = "train/rollouts", groups[0].responses[0].parts
        columns = ["prompt", "response", "reward", *parts, "log_ratio", "tokens", "finished"]
        rows = [
            [
                group.prompt,
                response.text,
                response.reward,
                *response.parts.values(),
                response.log_ratio,
                len(response.ids),
                str(response.finished),
            ]
            for group in groups
            for response in group.responses
        ]
        for tracker in self.accelerator.trackers:
            if tracker.name == "tensorboard":  # whose Markdown shows indented lines as they are
                lines = [f"    {json.dumps(row, ensure_ascii=False)}\n" for row in (columns, *rows)]
                tracker.log({name: "".join(lines)}, step=step)
            elif tracker.name == "wandb":
                tracker.log_table(name, columns=columns, data=rows, step=step)
            elif tracker.name == "trackio":  # accelerate's has no log_table
                import pandas as pd
                import trackio

                tracker.log(
                    {name: trackio.Table(dataframe=pd.DataFrame(rows, columns=columns))}, step=step
                )

    def samples(
        self,
        step: int,
        prompts: Sequence[str],
        responses: Sequence[Sequence[str]],
        rewards: list[list[float]],
    ) -> None:
        """Prints prompts with their responses and rewards, as wide as the terminal (80 columns in a
        file).
        """
        if not self.accelerator.is_main_process:
            return
        table = Table(title=f"samples at step {step}")
        table.add_column("end of prompt", ratio=2)
        table.add_column("response", ratio=3)
        table.add_column("reward", justify="right")
        for prompt, texts, scores in zip(prompts, responses, rewards, strict=True):
            table.add_section()
            for number, (response, score) in enumerate(zip(texts, scores, strict=True)):
                start = "" if number else visible(prompt_end(prompt))
                table.add_row(Text(start), Text(visible(response.strip())), f"{score:.2f}")
        with tqdm.external_write_mode(file=sys.stdout):
            Console().print(table)

    def print(self, line: str) -> None:
        if self.accelerator.is_main_process:
            tqdm.write(visible(line))

    def close(self) -> None:
        """Prints the metrics of the last step, draws the run's plot and ends the trackers."""
        self.bar.close()
        self.print_last_step()
        if self.accelerator.is_main_process:
            self.print(self.draw())
        # end_training ends the process group. That hangs while a thread of gloo waits for Python's
        # lock to drop the tensors of its last collective. The last collective is this barrier,
        # which has none.
        self.accelerator.wait_for_everyone()
        if self.ends_processes:
            self.accelerator.end_training()
        else:
            for tracker in self.accelerator.trackers:
                tracker.finish()

    def draw(self) -> str:
        """Draws the run's plot, and returns a line that says where it is. Whatever fails, such as a
        disk that is full, ends nothing: the line says so.
        """
        path = self.folder / PROGRESS
        try:
            drawn = draw_progress(self.folder / METRICS, self.folder / EVALUATIONS, path)
        except Exception as error:
            return f"{from_here(path)} is not drawn: {error}"
        place = from_here(path)
        return f"progress: {place}" if drawn else f"{place} is not drawn: no step was made"


def has_no_width(stream: TextIO) -> bool:
    """Whether a stream is a terminal of no columns, such as one of CI: a progress bar would be
    empty there.
    """
    try:
        return os.get_terminal_size(stream.fileno()).columns == 0
    except (OSError, ValueError, AttributeError):  # no terminal
        return False


def within_terminal(line: str) -> str:
    """A line of metrics, broken between them where a terminal would break a number. In a file it
    stays one line.
    """
    if not sys.stdout.isatty():
        return line
    joined = line.replace(" ", "\xa0").replace(",\xa0", ", ")
    width = shutil.get_terminal_size().columns
    lines = textwrap.wrap(
        joined, width, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False
    )
    return "\n".join(lines).replace("\xa0", " ")


def with_deviations(metrics: dict[str, float]) -> str:
    """Metrics on one line, with `reward 1.296 ± 0.668` for reward and reward_std."""
    means = {
        name: value
        for name, value in metrics.items()
        if name.removesuffix("_std") not in metrics.keys() - {name}
    }
    return ", ".join(
        f"{name} {value:.4g}"
        + (f" ± {metrics[f'{name}_std']:.4g}" if f"{name}_std" in metrics else "")
        for name, value in means.items()
    )
