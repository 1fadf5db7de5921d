"""What a page and a comparison show of a run: its options, steps, evaluations and rollouts, read
from its folder.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import yaml

from fastp3o.errors import UserError
from fastp3o.run.log import LoggedGroup, LoggedResponse, read, read_updates
from fastp3o.run.names import CONFIG, EVALUATIONS, METRICS, ROLLOUTS


@dataclass(frozen=True)
class LoggedRun:
    """A run's folder under the shortest name that tells it from the others. steps, evaluations: one
    dict a line.
    """

    name: str
    folder: Path
    options: dict[str, Any]
    steps: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]

    def rollouts(self) -> Iterator[tuple[LoggedGroup, LoggedResponse]]:
        """All responses that are logged, in the order of their updates."""
        for groups in read_updates(self.folder / ROLLOUTS):
            for group in groups:
                yield from ((group, response) for response in group.responses)


def read_runs(folders: Sequence[Path]) -> list[LoggedRun]:
    """Reads runs, also while they train. Raises UserError for a folder without a run, and for one
    that comes twice.
    """
    resolved = [folder.resolve() for folder in folders]
    for folder, place in zip(folders, resolved, strict=True):
        if not (folder / CONFIG).is_file():
            raise UserError(f"{folder} holds no run: it has no {CONFIG}")
        if resolved.count(place) > 1:
            raise UserError(f"{folder} is named twice")
    runs = []
    for folder, name in zip(folders, short_names(resolved), strict=True):
        options = yaml.safe_load((folder / CONFIG).read_text(encoding="utf-8"))
        if not isinstance(options, dict):
            raise UserError(f"{folder / CONFIG} must hold options, got {type(options).__name__}")
        runs.append(
            LoggedRun(
                name, folder, options, [*read(folder / METRICS)], [*read(folder / EVALUATIONS)]
            )
        )
    return runs


def short_names(folders: Sequence[Path]) -> list[str]:
    """As many last parts of each path as make all of them different."""
    longest = max(len(folder.parts) for folder in folders)
    for parts in range(1, longest + 1):
        names = ["/".join(folder.parts[-parts:]) for folder in folders]
        if len({*names}) == len(names):
            return names
    return [str(folder) for folder in folders]


def differing_options(runs: Sequence[LoggedRun]) -> dict[str, list[Any]]:
    """The options whose values are not the same in all runs, with the value in each; None where a
    run has no such option. The folders that runs write to always differ, and are left out.
    """
    names = dict.fromkeys(
        name for run in runs for name in run.options if name not in ("output_dir", "resume")
    )
    values = {name: [run.options.get(name) for run in runs] for name in names}
    return {
        name: of_runs
        for name, of_runs in values.items()
        if any(value != of_runs[0] for value in of_runs)
    }


def last_evaluations(runs: Sequence[LoggedRun]) -> dict[str, list[float | None]]:
    """The metrics of each run's last evaluation, `step` first; None where a run has no such metric."""
    last = [run.evaluations[-1] if run.evaluations else {} for run in runs]
    return {
        name: [of_run.get(name) for of_run in last]
        for name in dict.fromkeys(name for one in last for name in one)
    }


def answers(runs: Sequence[LoggedRun]) -> dict[str, list[LoggedResponse | None]]:
    """The prompts that are logged in more than one run, with the first response of each run's last
    update that has the prompt; None where a run has none. Runs on the same prompts log the same
    ones (`--log_rollouts_prompts`).
    """
    by_run: list[dict[str, LoggedResponse]] = []
    for run in runs:
        responses: dict[str, LoggedResponse] = {}
        for groups in read_updates(run.folder / ROLLOUTS):
            responses |= {group.prompt: group.responses[0] for group in groups}
        by_run.append(responses)
    # In the order in which the runs have them; a prompt counts once for each run.
    runs_with = Counter(chain.from_iterable(by_run))
    shared = [prompt for prompt, count in runs_with.items() if count > 1]
    return {prompt: [responses.get(prompt) for responses in by_run] for prompt in shared}
