"""metrics.jsonl and eval.jsonl: a line is appended for each step, and none is ever changed."""

import json
import math
from collections.abc import Mapping
from pathlib import Path

from fastp3o.training.durable import sync, write_file

METRICS = "metrics.jsonl"
EVALUATIONS = "eval.jsonl"


def append_line(path: Path, step: int, metrics: Mapping[str, float]) -> None:
    """Adds a line of JSON, in which a value that is not finite is null."""
    values = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
    with path.open("a") as file:
        file.write(json.dumps({"step": step, **values}, allow_nan=False) + "\n")


def keep_until(path: Path, step: int) -> list[str]:
    """Leaves out the lines after `step`, which a resumed run writes again, and what is no line: the end of a file on a
    disk that was full, or that lost its power. Returns a message for each of the latter.

    All lines up to `step` were synced before the state of that step was.
    """
    if not path.exists():
        return []
    content = path.read_bytes().decode(errors="replace")
    kept, unreadable = [], []
    for number, line in enumerate(content.splitlines(keepends=True), 1):
        try:
            is_kept = json.loads(line)["step"] <= step and line.endswith("\n")
        except (ValueError, TypeError, KeyError):
            unreadable.append(f"{path} line {number} is damaged and left out")
        else:
            kept += [line] if is_kept else []
    if "".join(kept) != content:
        write_file(path, "".join(kept))
    return unreadable


def sync_logs(folder: Path) -> None:
    for name in (METRICS, EVALUATIONS):
        if (folder / name).exists():
            sync(folder / name)
    sync(folder)
