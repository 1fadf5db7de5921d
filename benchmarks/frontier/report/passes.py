"""Passes over fresh rollouts: the policy moves away from what sampled within a round instead of between rounds."""

from dataclasses import replace
from pathlib import Path

from matplotlib.figure import Figure

from benchmarks.frontier.report import many
from benchmarks.frontier.report.drawing import LOOKS, bars, finish
from benchmarks.frontier.report.study import Study
from benchmarks.frontier.runs import stale
from benchmarks.frontier.runs.plan import BETA, Run
from benchmarks.frontier.runs.tuned_arms import USUAL_PASSES, arm

HEADER = ["passes", "algorithm"]
COUNTS = sorted(stale.PASSES)


def arms() -> dict[tuple[str, ...], Run]:
    return {(str(count), many.name_of(one)): one for count in COUNTS for one in stale.with_passes(count)}


def pairs() -> many.Pairs:
    """Joint and unclipped P3O against the others with as many passes, and every algorithm against itself with 4."""
    found, compared = arms(), {}
    for (count, name), one in found.items():
        for first in (found[count, many.name_of(arm(clipping))] for clipping in ("joint", "none")):
            if one.algorithm not in (first.algorithm, "joint"):
                compared[count, many.name_of(first), name] = first, one
        usual = found[str(USUAL_PASSES), name]
        if one != usual:
            compared[count, name, f"itself with {USUAL_PASSES}"] = one, usual
    return compared


def figure(study: Study, path: Path) -> bool:
    """Reward − BETA KL over the number of passes, less joint P3O with the usual ones."""
    start = next(one for one in stale.with_passes(USUAL_PASSES) if one.algorithm == "joint")
    lines: dict[Run, list] = {}
    for (count, _), one in arms().items():
        estimate = many.difference(study, (one, start), "end")
        if estimate is None:
            return False
        lines.setdefault(replace(one, inner_epochs=0), []).append((int(count), estimate))
    page = Figure(figsize=(7, 4.6), layout="constrained")
    axes = page.subplots()
    for place, (one, points) in enumerate(lines.items()):
        counts = [count * 1.02 ** (place - len(lines) / 2) for count, _ in points]
        estimates = [estimate for _, estimate in points]
        look = LOOKS[one.algorithm] | {"markersize": 5, "linewidth": 1.5, "elinewidth": 1}
        means, errors = [estimate.mean for estimate in estimates], bars([estimate[:3] for estimate in estimates])
        axes.errorbar(counts, means, yerr=errors, label=many.name_of(one), **look)
    axes.set(
        xscale="log", xlabel="passes over the rollouts of an update", ylabel=f"reward − {BETA:g} KL, less joint P3O"
    )
    axes.set_xticks(COUNTS, list(map(str, COUNTS)))
    axes.minorticks_off()
    finish(page, [axes], "Fresh rollouts, 4 responses to a prompt: paired differences on eight languages", path)
    return True
