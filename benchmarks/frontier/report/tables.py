"""Recorded runs -> tables.md and all_runs.md. What has no runs is written "not measured"."""

from pathlib import Path

from benchmarks.frontier.report import (
    cells,
    comparisons,
    endpoints,
    envelope,
    equal_cost,
    equal_kl,
    learning_rates,
    many,
    objective,
    passes,
    questions,
    rewards,
    sixteen,
    stale,
)
from benchmarks.frontier.report.acceptance import checked_rules
from benchmarks.frontier.report.sanity import Optimum
from benchmarks.frontier.report.study import Study
from benchmarks.frontier.runs.plan import BETA, HIGH_LEARNING_RATE
from benchmarks.frontier.runs.records import Records
from benchmarks.frontier.tasks.groups import STUDIED
from benchmarks.goals import NOT_MEASURED
from benchmarks.report import markdown

FOLDER = Path(__file__).parents[1]
TABLES, ALL_RUNS = FOLDER / "tables.md", FOLDER / "all_runs.md"
NAMES = (
    "A run's name: task, algorithm, learning rate, KL coefficient, seed, offset, its standard deviation, responses per "
    "prompt, prompts per update, and every setting that is not the default. `python -m benchmarks.frontier --only NAME "
    "--results FOLDER` repeats a run."
)
WORDS = (
    "Proxy: the learned reward that is trained on. Gold: the true utility, which only artificial languages have. Both "
    "are gains over the start, in standard deviations of the reward. KL: to the start, in nats per response. K: "
    "responses per prompt. Joint, separate, none: P3O's clippings."
)
DIFFERENCES = (
    "Differences are paired: mean [its 95% interval], together [the interval that holds at once with all others of its "
    "table] (seeds). A star marks those that are found at a false discovery rate of 5% over their table."
)
RLOO = (
    "RLOO's rows, and comparisons with them at equal KL, do not rank it: its rate was chosen without a fair trial of "
    "3e-4 (two_languages.md). The ten languages do."
)

ORDER = ["task", "algorithm", "offset", "responses_per_prompt", "learning_rate", "kl_coef", "seed"]
# Columns of all_runs.md: the column of the frame of runs, and how a value is written.
COLUMNS = {
    "run": ("name", str),
    "first KL": ("first_kl", cells.number),
    "final KL": ("final_kl", cells.number),
    "final gain, proxy": ("final_reward", cells.number),
    "gold": ("final_gold", cells.number),
    "missing EOS": ("final_missing_eos", "{:.1%}".format),
    "weights": ("sha256", lambda digits: digits[:12]),
    "s": ("seconds", "{:.0f}".format),
}


def tables_page(study: Study, optimum: Optimum) -> str:
    made = "Made from the recorded runs by `python -m benchmarks.frontier.report`; README.md says what they mean."
    parts = ["# Tables", made, WORDS, DIFFERENCES]
    parts += ["## Acceptance", markdown([["rule", "measured", ""], *map(list, checked_rules(study, optimum))])]
    for group in STUDIED:
        parts += group_sections(study, group)
    parts += objective_sections(study)
    parts += envelope_sections(study, optimum)
    for question in questions.questions(study):
        parts += question_sections(study, question)
    parts += equal_cost_sections(study)
    parts += stale_sections(study)
    parts += further_sections(study)
    parts += equal_kl_sections(study)
    return "\n\n".join(parts) + "\n"


def group_sections(study: Study, group: str) -> list[str]:
    title = group.capitalize()
    compared, count = comparisons.differences(study, group)
    rate = cells.rate(HIGH_LEARNING_RATE)
    return [
        f"## {title}: gain at equal KL",
        "Mean over seeds [95% interval] (seeds that reach the KL after their first evaluation). First KL: the smallest "
        "and largest KL at the first evaluation.",
        shown(comparisons.levels(study, group)),
        f"## {title}: paired differences",
        f"Over the seeds that both arms share; {count} intervals:",
        shown(compared),
        f"## {title}: learning rates",
        "Proxy; chosen rates in bold. Mean [95% interval] (seeds that reach the KL):",
        shown(learning_rates.table(study, group)),
        "The largest distance between these means, over the learning rates of each algorithm and over the algorithms "
        "at their chosen rates (seeds of the results; arms of which most seeds reach the KL):",
        shown(learning_rates.spreads(study, group)),
        f"## {title}: clipping at learning rate {rate}",
        shown(endpoints.clipping(study, group)),
        f"## {title}: scaling by the deviation of absolute scores",
        shown(endpoints.scaling(study, group)),
        f"## {title}: KL coefficients",
        shown(endpoints.kl_coefs(study, group)),
        "Straight lines through the ends of these runs, proxy:",
        shown(endpoints.fitted_lines(study, group)),
    ]


def objective_sections(study: Study) -> list[str]:
    compared, count = objective.differences(study)
    return [
        "## Reward − β KL at the end of runs",
        f"This is what training maximises. All runs that trained with β = {BETA:g} are here, except those of "
        "online DPO, whose β is not a price in rewards. Mean over seeds [95% interval] (seeds):",
        shown(objective.table(study)),
        f"Paired differences over shared seeds; {count} intervals:",
        shown(compared),
    ]


def envelope_sections(study: Study, optimum: Optimum) -> list[str]:
    compared, count = envelope.differences(study)
    return [
        "## Retuned: every algorithm tuned over learning rate and KL coefficient",
        "At each KL with the setting that the selection seeds chose for it. Algorithms that a group's mean and "
        "deviation define take 4 responses to 32 prompts, the others 2 to 64. Update: where runs first cross the KL. "
        "Mean over seeds [95% interval] (seeds that reach the KL):",
        RLOO,
        shown(envelope.table(study, optimum)),
        f"Paired differences over shared seeds; {count} intervals:",
        shown(compared),
        "The trials on the selection seeds:",
        shown(envelope.trials(study)),
        "Rank correlation of these gains with the update at which runs cross the KL (settings whose runs all do): "
        + "; ".join(f"at KL {kl:g} {envelope.slowness(study, kl)}" for kl in envelope.ENVELOPE_KLS)
        + ".",
        "Published algorithms, all with 4 responses to 32 prompts, at their setting for the highest KL:",
        shown(envelope.in_fours(study)),
    ]


def question_sections(study: Study, question: questions.Question) -> list[str]:
    compared, count = questions.differences(study, question)
    return [
        f"## Retuned: {question.title}",
        "Mean over seeds [95% interval] (seeds that reach the KL):",
        shown(questions.table(study, question)),
        f"Paired differences; {count} intervals:",
        shown(compared),
    ]


def equal_cost_sections(study: Study) -> list[str]:
    of_responses, many = equal_cost.differences(study, equal_cost.more_responses(study))
    of_rivals, fewer = equal_cost.differences(study, equal_cost.rivals(study))
    return [
        "## Long prompts: K at equal cost",
        "Prompts have 122 tokens; each algorithm has the rate that was chosen for it on short prompts. Tokens count "
        "each prompt once, and all responses; seconds are of one core, without evaluations. β is the KL coefficient. "
        "The first table compares all runs at the total cost of the cheapest, the tables of differences each pair at "
        "the total cost of the cheaper one. Mean over seeds [95% interval] (seeds):",
        RLOO,
        shown(equal_cost.table(study)),
        f"More responses, paired differences; {many} intervals:",
        shown(of_responses),
        f"Algorithms with as many responses, paired differences; {fewer} intervals:",
        shown(of_rivals),
    ]


def stale_sections(study: Study) -> list[str]:
    arms = stale.arms(study)
    if not arms:
        return []
    parts = [
        "## Ten languages: stale rollouts",
        "Lag: updates between the policy that sampled and the one that trains. Corrections: none, ratios to the policy "
        "before the update, as if it had sampled; ratios, to the policy that sampled; weights, as none with losses "
        "weighed by the capped ratio of the two. Mean over eight languages [95% interval] (languages that have it):",
        shown(many.levels(study, arms, stale.HEADER)),
    ]
    for title, pairs, header in (
        ("The best P3O of the selection languages against every other algorithm", stale.rivals(study), ["lag", "K"]),
        (f"Ratios to the policy that sampled, at lag {stale.OLDEST}", stale.with_ratios(study), ["K"]),
        ("What stale rollouts cost", stale.lost(study), ["lag", "K"]),
    ):
        compared, count = many.differences(study, pairs, [*header, "first", "minus"])
        parts += [f"{title}; {count} intervals:", shown(compared)]
    tried = many.trials(study, stale.corrections(), stale.HEADER[2:]), many.trials(study, arms, stale.HEADER)
    return [*parts, "The trials of corrections, and then of rates, on the two selection languages:", *map(shown, tried)]


def further_sections(study: Study) -> list[str]:
    """Questions on the ten languages whose runs have been made."""
    parts = []
    for title, arms, pairs, header, own in (
        ("passes over fresh rollouts", passes.arms(), passes.pairs(), passes.HEADER, []),
        (
            "offsets that nothing predicts",
            rewards.doses(),
            rewards.losses(),
            rewards.HEADER,
            [rewards.different_weights(study)],
        ),
        (
            "a scale that differs between prompts",
            rewards.scaled(),
            rewards.scaled_pairs(),
            ["spread", "K", "algorithm"],
            [],
        ),
        ("16 responses to a prompt", sixteen.arms(), sixteen.pairs(), sixteen.HEADER, []),
    ):
        if all(many.measured(study, arm).empty for arm in arms.values()):
            continue
        compared, count = many.differences(study, pairs, [*header, "minus"])
        parts += [
            f"## Ten languages: {title}",
            shown(many.levels(study, arms, header)),
            *(markdown(lines) for lines in own if len(lines) > 1),
        ]
        parts += [f"Paired differences; {count} intervals:", shown(compared)]
    return parts


def equal_kl_sections(study: Study) -> list[str]:
    tried, compared = equal_kl.trials(study), equal_kl.levels(study)
    if len(compared) == 1:
        return []
    judged, count = equal_kl.differences(study)
    return [
        "## Ten languages: equal KL, every algorithm over all rates and coefficients",
        "4 responses to a prompt. Every algorithm tries four rates with three KL coefficients. A setting with a run "
        "that does not get beyond the highest KL in 20 updates runs again with 40. At each KL an algorithm has the "
        "setting with the highest gain there on the two selection languages. Update: where runs first cross the KL. In "
        f'the trials "{cells.NOT_REACHED}" holds as well for runs that pass the KL before their first evaluation.',
        shown(compared),
        f"Paired differences; {count} intervals:",
        shown(judged),
        "The trials on the two selection languages:",
        shown(tried),
    ]


def shown(lines: list[list[str]]) -> str:
    """The table, or "Not measured." if it has no measurement."""
    return markdown(lines) if any(line[-1] != NOT_MEASURED for line in lines[1:]) else f"{NOT_MEASURED.capitalize()}."


def all_runs_page(study: Study) -> str:
    return f"# All {len(study.records.runs)} runs\n\n{NAMES}\n\n{markdown(every_run(study.records))}\n"


def every_run(records: Records) -> list[list[str]]:
    """Every recorded run, none left out. Header first."""
    runs = records.runs.sort_values(ORDER)
    columns = {name: runs[field].map(form, na_action="ignore") for name, (field, form) in COLUMNS.items()}
    return [list(columns), *zip(*(values.fillna("") for values in columns.values()), strict=True)]
