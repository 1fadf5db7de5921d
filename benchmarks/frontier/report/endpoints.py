"""Where runs end: clipping at the high learning rate, scaling under an offset, the sweep of KL coefficients."""

from benchmarks.frontier import cells
from benchmarks.frontier.comparisons import matched_kls
from benchmarks.frontier.plan import ALGORITHMS, HIGH_LEARNING_RATE, KL_COEFS
from benchmarks.frontier.records import OUTCOMES, Arm, Record, Study, by_seed, final_gain, gains_at
from fastp3o.evaluation.matched_kl import Evaluations, line

CLIPPINGS = ("joint", "separate", "none")
HIGH_KLS = (2.0, 4.0, 8.0, 12.0)  # nats per response
SCALED = ("joint", "joint-absolute")


def final_kls(runs: list[Record]) -> dict:
    return {seed: run["evaluations"][-1]["kl"] for seed, run in by_seed(runs).items()}


def final_gains(runs: list[Record], of: str) -> dict:
    return {seed: final_gain(run, of) for seed, run in by_seed(runs).items()}


def clipping(study: Study, group: str) -> list[list[str]]:
    """Final KL of each seed, and the proxy's gain at matched KL. Header first."""
    rows = [["clipping", "final KL by seed", "final KL", "first KL", *(f"gain at KL {kl:g}" for kl in HIGH_KLS)]]
    for algorithm in CLIPPINGS:
        runs = study.runs_of(group, Arm(algorithm, learning_rate=HIGH_LEARNING_RATE))
        final = final_kls(runs)
        seeds = ", ".join(f"{final[seed]:.1f}" for seed in sorted(final)) or cells.NOT_MEASURED
        gains = [cells.level(gains_at(runs, kl, "reward")) for kl in HIGH_KLS]
        rows.append([algorithm, seeds, cells.level(final), cells.first_kl(runs), *gains])
    return rows


def at_the_end(about: list[str], runs: list[Record], group: str) -> list[str]:
    return [*about, cells.level(final_kls(runs)), *(cells.level(final_gains(runs, of)) for of in OUTCOMES[group])]


def scaling(study: Study, group: str) -> list[list[str]]:
    """Rewards as they are, and divided by the deviation of absolute scores. Header first."""
    rows = [["algorithm", "offset", "final KL", *(f"final gain, {name}" for name in OUTCOMES[group].values())]]
    for algorithm in SCALED:
        for offset in ("none", "unlearnable"):
            rows.append(at_the_end([algorithm, offset], study.runs_of(group, Arm(algorithm, offset)), group))
    return rows


def sweep(study: Study, group: str) -> list[list[str]]:
    """Every algorithm with every KL coefficient: its ends, and the proxy's gain at matched KL. Header first."""
    kls = matched_kls(study, group)
    header = ["algorithm", "KL coefficient", "final KL", *(f"final gain, {name}" for name in OUTCOMES[group].values())]
    rows = [header + [f"gain at KL {kl:g}" for kl in kls]]
    for algorithm in ALGORITHMS:
        for kl_coef in KL_COEFS[algorithm]:
            runs = study.runs_of(group, Arm(algorithm, kl_coef=kl_coef))
            gains = [cells.level(gains_at(runs, kl, "reward")) for kl in kls]
            rows.append(at_the_end([algorithm, f"{kl_coef:g}"], runs, group) + gains)
    return rows


def ends(study: Study, group: str, algorithm: str) -> list[Evaluations]:
    """The final KL and proxy gain of every run of the sweep; runs of one seed together, as they are not independent."""
    of_seed: dict = {}
    for kl_coef in KL_COEFS[algorithm]:
        for seed, run in by_seed(study.runs_of(group, Arm(algorithm, kl_coef=kl_coef))).items():
            end = {"kl": run["evaluations"][-1]["kl"], "reward": final_gain(run, "reward")}
            of_seed.setdefault(seed, []).append(end)
    return list(of_seed.values())


def lines(study: Study, group: str) -> list[list[str]]:
    """The straight line through the ends of each algorithm's sweep. Header first."""
    rows = [["algorithm", "gain per nat", "gain at KL 0"]]
    for algorithm in ALGORITHMS:
        fit = line(ends(study, group, algorithm))
        if fit is None:
            rows.append([algorithm, cells.NOT_MEASURED, cells.NOT_MEASURED])
        else:
            slope = cells.number(fit.slope) + cells.within(fit.low, fit.high)
            rows.append([algorithm, slope, cells.number(fit.intercept)])
    return rows
