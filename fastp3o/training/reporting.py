"""Reports the metrics of a run: JSON lines, accelerate's trackers, a progress bar, tables of samples, and timings."""

import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from accelerate import Accelerator
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from fastp3o.training.run_folder import EVALUATIONS, METRICS, append_line


class Reporter:
    """Writes one line a step to metrics.jsonl and one an evaluation to eval.jsonl, from the main process only."""

    def __init__(self, accelerator: Accelerator, folder: Path, *, stage: str, first_step: int, steps: int):
        self.accelerator, self.folder = accelerator, folder
        # None: on terminals only. In a log file every redrawing would be a line.
        disable = None if accelerator.is_main_process else True
        self.bar = tqdm(total=steps, initial=first_step, desc=stage, unit="step", disable=disable)

    def step(self, step: int, metrics: dict[str, float], shown: tuple[str, ...]) -> None:
        self.write(METRICS, step, metrics)
        self.accelerator.log({f"train/{name}": value for name, value in metrics.items()}, step=step)
        self.bar.set_postfix({name: f"{metrics[name]:.3g}" for name in shown}, refresh=False)
        self.bar.update(1)

    def evaluation(self, step: int, metrics: dict[str, float]) -> None:
        self.write(EVALUATIONS, step, metrics)
        self.accelerator.log({f"eval/{name}": value for name, value in metrics.items()}, step=step)
        self.print(f"after step {step}: {with_deviations(metrics)}")

    def write(self, name: str, step: int, metrics: dict[str, float]) -> None:
        if self.accelerator.is_main_process:
            append_line(self.folder / name, step, metrics)

    def samples(self, step: int, prompts: list[str], responses: list[list[str]], rewards: list[list[float]]) -> None:
        """Prints prompts with their responses and rewards, as wide as the terminal (80 columns in a file)."""
        if not self.accelerator.is_main_process:
            return
        table = Table(title=f"samples at step {step}")
        table.add_column("end of prompt", ratio=2)
        table.add_column("response", ratio=3)
        table.add_column("reward", justify="right")
        for prompt, texts, scores in zip(prompts, responses, rewards, strict=True):
            table.add_section()
            for number, (response, score) in enumerate(zip(texts, scores, strict=True)):
                table.add_row("" if number else prompt_end(prompt), response.strip(), f"{score:.2f}")
        with tqdm.external_write_mode(file=sys.stdout):
            Console().print(table, markup=False)

    def print(self, line: str) -> None:
        if self.accelerator.is_main_process:
            tqdm.write(line)

    def close(self) -> None:
        self.bar.close()
        # end_training ends the process group. That hangs while a thread of gloo waits for Python's lock to drop the
        # tensors of its last collective. The last collective is this barrier, which has none.
        self.accelerator.wait_for_everyone()
        self.accelerator.end_training()


def with_deviations(metrics: dict[str, float]) -> str:
    """Metrics on one line, with `reward 1.296 ± 0.668` for reward and reward_std."""
    means = {name: value for name, value in metrics.items() if name.removesuffix("_std") not in metrics.keys() - {name}}
    return ", ".join(
        f"{name} {value:.4g}" + (f" ± {metrics[f'{name}_std']:.4g}" if f"{name}_std" in metrics else "")
        for name, value in means.items()
    )


def prompt_end(prompt: str, characters: int = 120) -> str:
    """The end of a prompt, on one line."""
    line = " ".join(prompt.split())
    return line if len(line) <= characters else "…" + line[-characters:]


class Phases:
    """Seconds spent in each named phase since the last reading."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        start = now()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + now() - start

    def read(self) -> dict[str, float]:
        seconds, self.seconds = self.seconds, {}
        return seconds


def now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def peak_memory_gib() -> float:
    """The most memory used so far: the GPU's if there is one, else the process's."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**30
    kib = 1 if sys.platform == "darwin" else 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * kib / 2**30
