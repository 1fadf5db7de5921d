"""The best evaluation of a run so far, whose model is kept, and how many have come since without a
better one.
"""

import json
from collections.abc import Mapping
from math import isnan
from pathlib import Path
from typing import Any

from fastp3o.errors import UserError
from fastp3o.files import from_here
from fastp3o.run.log import read
from fastp3o.run.names import BEST_MODEL, EVALUATIONS

BEST_EVALUATION = "evaluation.json"


class Best:
    """The best evaluation by one metric. best: its metrics, with `step`; None before the first.
    since: evaluations after it, none of which was better.
    """

    def __init__(self, metric: str, *, lowest: bool, folder: Path):
        """lowest: whether lower values are better. folder: of the run, which may continue from a
        state before its best evaluation: that one's model stays until a better one.
        """
        self.metric, self.lowest, self.since = metric, lowest, 0
        self.best: dict[str, Any] | None = None
        path = folder / BEST_MODEL / BEST_EVALUATION
        if not path.exists():
            return
        try:
            best = json.loads(path.read_text())
            float(best[metric])
            self.best = best
            self.since = sum(line["step"] > best["step"] for line in read(folder / EVALUATIONS))
        except (ValueError, KeyError, TypeError) as error:
            path = from_here(path)
            raise UserError(
                f"{path} is damaged: restore it, or remove {path.parent} to search again"
            ) from error

    def improves(self, step: int, metrics: Mapping[str, float]) -> bool:
        """Notes an evaluation, and returns whether it is the best so far. Any number is better than
        NaN. Raises UserError if the evaluation lacks the metric.
        """
        if self.metric not in metrics:
            raise UserError(f"--keep_best {self.metric}: evaluations have {', '.join(metrics)}")
        if self.best is not None:
            value, best = metrics[self.metric], self.best[self.metric]
            better = (value < best if self.lowest else value > best) or (
                isnan(best) and not isnan(value)
            )
            if not better:
                self.since += step > self.best["step"]
                return False
        self.best, self.since = {"step": step, **metrics}, 0
        return True

    @property
    def file(self) -> dict[str, str]:
        """The file that goes with the model, by name."""
        return {BEST_EVALUATION: json.dumps(self.best, indent=1) + "\n"}

    def __str__(self) -> str:
        """The best value and its step, in words."""
        if self.best is None:
            return f"{self.metric}: no evaluation"
        return f"{self.metric} {self.best[self.metric]:.4g} after step {self.best['step']}"
