"""Where runs end: clipping at the high learning rate, scaling under an offset, the sweep of KL coefficients."""

import pandas as pd

from benchmarks.frontier.report import cells
from benchmarks.frontier.report.comparisons import matched_kls
from benchmarks.frontier.report.study import OUTCOMES, Arm, Study
from benchmarks.frontier.runs.plan import ALGORITHMS, CLIPPINGS, HIGH_LEARNING_RATE, KL_COEFS
from benchmarks.frontier.runs.records import SEED
from fastp3o.evaluation.frontier import Evaluations
from fastp3o.evaluation.matched_kl import line

HIGH_KLS = (2.0, 4.0, 8.0, 12.0)  # nats per response
SCALED = ("joint", "joint-absolute")


def clipping(study: Study, group: str) -> list[list[str]]:
    """Final KL of each seed, and the proxy's gain at equal KL. Header first."""
    lines = [["clipping", "final KL by seed", "final KL", "first KL", *(f"gain at KL {kl:g}" for kl in HIGH_KLS)]]
    for algorithm in CLIPPINGS:
        arm = Arm(algorithm, learning_rate=HIGH_LEARNING_RATE)
        runs = study.runs_of(group, arm)
        by_seed = ", ".join(f"{kl:.1f}" for kl in runs["final_kl"].sort_index()) or cells.NOT_MEASURED
        gains = [cells.mean(study.gains(group, arm, kl, "reward")) for kl in HIGH_KLS]
        lines.append([algorithm, by_seed, cells.mean(runs["final_kl"]), cells.extent(runs["first_kl"]), *gains])
    return lines


def end_columns(group: str) -> dict[str, str]:
    """Columns of the frame of runs, and their names in tables."""
    return {"final_kl": "final KL"} | {f"final_{key}": f"final gain, {name}" for key, name in OUTCOMES[group].items()}


def scaling(study: Study, group: str) -> list[list[str]]:
    """Rewards as they are, and divided by the deviation of absolute scores. Header first."""
    columns = end_columns(group)
    lines = [["algorithm", "offset", *columns.values()]]
    for algorithm in SCALED:
        for offset in ("none", "unlearnable"):
            runs = study.runs_of(group, Arm(algorithm, offset))
            lines.append([algorithm, offset, *cells.means(runs, list(columns))])
    return lines


def kl_coefs(study: Study, group: str) -> list[list[str]]:
    """Every algorithm with every KL coefficient: its ends, and the proxy's gain at equal KL. Header first."""
    kls, columns = matched_kls(study, group), end_columns(group)
    lines = [["algorithm", "KL coefficient", *columns.values(), *(f"gain at KL {kl:g}" for kl in kls)]]
    for algorithm in ALGORITHMS:
        for kl_coef in KL_COEFS[algorithm]:
            arm = Arm(algorithm, kl_coef=kl_coef)
            ends = cells.means(study.runs_of(group, arm), list(columns))
            gains = [cells.mean(study.gains(group, arm, kl, "reward")) for kl in kls]
            lines.append([algorithm, f"{kl_coef:g}", *ends, *gains])
    return lines


def ends(study: Study, group: str, algorithm: str) -> list[Evaluations]:
    """Final KL and proxy gain of every run of the sweep, grouped by seed: runs of one seed are not independent."""
    runs = pd.concat(study.runs_of(group, Arm(algorithm, kl_coef=kl_coef)) for kl_coef in KL_COEFS[algorithm])
    points = runs[["final_kl", "final_reward"]].set_axis(["kl", "reward"], axis=1)
    return [seed_points.to_dict("records") for _, seed_points in points.groupby(SEED, sort=False)]


def fitted_lines(study: Study, group: str) -> list[list[str]]:
    """The straight line through the ends of each algorithm's sweep. Header first."""
    lines = [["algorithm", "gain per nat", "gain at KL 0"]]
    for algorithm in ALGORITHMS:
        fit = line(ends(study, group, algorithm))
        if fit is None:
            lines.append([algorithm, cells.NOT_MEASURED, cells.NOT_MEASURED])
        else:
            slope = cells.number(fit.slope) + cells.within(fit.low, fit.high)
            lines.append([algorithm, slope, cells.number(fit.intercept)])
    return lines
