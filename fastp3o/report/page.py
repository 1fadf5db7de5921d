"""One HTML file that shows runs: curves, last evaluations, options, and the logged responses, to
sort and to search.

It needs no server and no network, and its content policy forbids both. What a policy wrote is data
in it, never HTML.
"""

import html
import io
import json
from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import Path
from string import Template
from typing import Any

from fastp3o import __version__
from fastp3o.report.curves import draw_curves
from fastp3o.report.read import LoggedRun, differing_options, last_evaluations
from fastp3o.run.log import LoggedGroup, LoggedResponse

TEMPLATE = Path(__file__).with_name("page.html")


class PageTemplate(Template):
    """JavaScript has `${name}` in strings itself."""

    delimiter = "@@"


def page(runs: Sequence[LoggedRun], most_responses: int) -> str:
    """The page's HTML. most_responses: of each run, the latest."""
    rows: list[dict[str, Any]] = []
    counts: list[str] = []
    for number, run in enumerate(runs):
        # A log may be larger than memory.
        latest: deque[tuple[LoggedGroup, LoggedResponse]] = deque(maxlen=most_responses)
        logged = 0
        for response in run.rollouts():
            latest.append(response)
            logged += 1
        rows += [response_row(number, *response) for response in latest]
        kept = "all" if len(latest) == logged else f"the last {len(latest):,} of"
        counts.append(f"{run.name}: {kept} {logged:,} logged")
    # "</script>" in a response would end the data.
    data = json.dumps(
        {"runs": [run.name for run in runs], "rows": rows}, ensure_ascii=False
    ).replace("<", "\\u003c")
    return PageTemplate(TEMPLATE.read_text(encoding="utf-8")).substitute(
        title=html.escape(", ".join(run.name for run in runs)),
        made=html.escape(f"Written by fastp3o {__version__}. {steps(runs)}"),
        curves=curves(runs),
        evaluations=table("metric", runs, last_evaluations(runs), "No run has been evaluated."),
        differences=differences(runs),
        options=table("option", runs, all_options(runs), ""),
        counted=html.escape("; ".join(counts)),
        data=data,
    )


def response_row(run: int, group: LoggedGroup, response: LoggedResponse) -> dict[str, Any]:
    return {
        "run": run,
        "update": group.step,
        "prompt": group.prompt,
        "text": response.text,
        "reward": response.reward,
        "parts": {name.removeprefix("reward/"): value for name, value in response.parts.items()},
        "log_ratio": response.log_ratio,
        "tokens": len(response.ids),
        "finished": response.finished,
    }


def steps(runs: Iterable[LoggedRun]) -> str:
    last = {run.name: run.steps[-1]["step"] if run.steps else 0 for run in runs}
    return "Steps: " + ", ".join(f"{name} {step}" for name, step in last.items())


def curves(runs: Sequence[LoggedRun]) -> str:
    """An SVG drawing inside the page."""
    figure = draw_curves(runs)
    if figure is None:
        return "<p>No step has been logged.</p>"
    file = io.StringIO()
    figure.savefig(file, format="svg", metadata={"Date": None})
    drawn = file.getvalue()
    return drawn[drawn.index("<svg") :]  # the rest declares a file of XML


def differences(runs: Sequence[LoggedRun]) -> str:
    if len(runs) < 2:
        return ""
    content = table(
        "option", runs, differing_options(runs), "The options of these runs are the same."
    )
    return f'<h2>Options that differ</h2>\n<div class="wide">{content}</div>'


def all_options(runs: Sequence[LoggedRun]) -> dict[str, list[Any]]:
    names = dict.fromkeys(name for run in runs for name in run.options)
    return {name: [run.options.get(name) for run in runs] for name in names}


def table(first: str, runs: Sequence[LoggedRun], rows: dict[str, list[Any]], otherwise: str) -> str:
    """A column for each run. otherwise: what stands in place of a table without rows."""
    if not rows:
        return f"<p>{html.escape(otherwise)}</p>"
    header = "".join(
        f"<th>{html.escape(name)}</th>" for name in (first, *(run.name for run in runs))
    )
    lines = [f"<tr>{header}</tr>"]
    for name, values in rows.items():
        cells = "".join(f"<td>{html.escape(shown(value))}</td>" for value in values)
        lines.append(f"<tr><td>{html.escape(name)}</td>{cells}</tr>")
    return f"<table>{''.join(lines)}</table>"


def shown(value: Any) -> str:
    if value is None:
        return "–"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
