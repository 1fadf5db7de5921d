"""The KL coefficient as a factor of its own: gains at several KLs against β, from the recorded
trials.
"""

from benchmarks.frontier.report.measures import NAMES, Study
from benchmarks.frontier.runs.records import Records
from benchmarks.frontier.runs.tuned_arms import SELECTION
from fastp3o.evaluation.matched_kl import gain_at_kl

KLS, BETAS = (1.0, 2.0, 4.0), (0.03, 0.1, 0.3, 1.0)
ALGORITHMS = ("joint", "ppo", "rloo", "rebel", "dpo")
# The trials differ in rate, coefficient and number of updates alone.
TRIALS = (
    "responses_per_prompt == 4 and offset == 'none' and rounds_ahead == 0 and inner_epochs == 0"
)
TRIALS += " and reward_spread == 0 and critic_learning_rate == 0 and value_clip_range == 0 and own_parameter in (0, 3)"
TRIALS += " and kl_per_update == 0"


def gain(records: Records, algorithm: str, beta: float, kl: float) -> float | None:
    """Mean over the languages that choose, at the best rate and number of updates; None if no
    setting gets there.
    """
    seeds, found = [seed for seed, _ in SELECTION], []
    runs = records.runs.query(
        f"{TRIALS} and algorithm == '{algorithm}' and kl_coef == {beta} and seed in {seeds}"
    )
    for _, ran in runs[runs["task"].isin([task for _, task in SELECTION])].groupby(
        ["learning_rate", "updates"]
    ):
        gains = [gain_at_kl(records.histories[name], kl) for name in ran["name"]]
        reached = [one for one in gains if one is not None]
        if len(reached) == len(gains) == len(SELECTION):
            found.append(sum(reached) / len(reached))
    return max(found, default=None)


def table(study: Study) -> list[list[str]]:
    """A line an algorithm, a column a KL, in it a gain for each of BETAS. Header first."""
    lines = [
        ["β " + "/".join(f"{beta:g}" for beta in BETAS), *(f"gain at KL {kl:g}" for kl in KLS)]
    ]
    for algorithm in ALGORITHMS:
        gains = [[gain(study.records, algorithm, beta, kl) for beta in BETAS] for kl in KLS]
        cells = [
            "/".join("–" if one is None else f"{one:.2f}" for one in column) for column in gains
        ]
        lines.append([NAMES[algorithm], *cells])
    return lines
