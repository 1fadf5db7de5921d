import hashlib
import json
import math
import re
from dataclasses import asdict

import matplotlib.image
import numpy as np
import pytest
from pandas import MultiIndex, Series
from pandas.testing import assert_frame_equal

from benchmarks.frontier.report import (
    acceptance,
    cells,
    comparisons,
    endpoints,
    envelope,
    equal_cost,
    figures,
    learning_rates,
    objective,
    questions,
    readme_plot,
    sanity,
    tables,
    tuned_figures,
    verdicts,
)
from benchmarks.frontier.report.__main__ import README_PLOT
from benchmarks.frontier.report.study import Arm, Study, load_study
from benchmarks.frontier.runs import parts, plan, records, tuning
from benchmarks.frontier.runs.plan import Run
from benchmarks.frontier.runs.records import to_frames
from benchmarks.frontier.tasks.groups import DOCSTRINGS, LONG_PROMPTS, MANY_LANGUAGES, RETUNED, STUDIED
from benchmarks.report import markdown

RATES = {name: {"joint": 3e-4, "separate": 3e-4, "none": 3e-4, "ppo": 1.5e-4, "dpo": 6e-4} for name in STUDIED}
TUNED = {
    RETUNED: {
        "own_parameters": {"rebel": {"1": 1.0, "2": 3.0}, "gspo": {"1": 0.01, "2": 0.01}},
        "settings": {
            name: {
                kl: {
                    "learning_rate": tuning.TRIAL_RATES[name][0],
                    "kl_coef": plan.KL_COEFS[name][number],
                    "own_parameter": {"rebel": float(own), "gspo": 0.01}.get(name, 0.0),
                }
                for kl, number, own in (("1", 2, 1), ("2", 1, 3))
            }
            for name in plan.EVERYONE
        },
    }
}
UPDATES = (0, 1, 2, 3, 5, 7, 10, 14, 20, 28, 40)


def best(kl):
    return 1.4 * kl**0.5


def record(run: Run) -> dict:
    """A made-up run: clippings alike, PPO much worse under an unlearnable offset, KL by learning rate and algorithm."""
    rng_of_seed = np.random.default_rng([run.seed, 7])
    noise = np.random.default_rng(int(hashlib.sha256(run.name.encode()).hexdigest()[:8], 16))
    speed = 5 * (run.learning_rate / 3e-4) ** 0.8 * (0.03 / run.kl_coef) ** 0.25 * rng_of_seed.uniform(0.9, 1.15)
    speed *= {"none": 1.6, "ppo": 1.5, "dpo": 1.2}.get(run.algorithm, 1.0)
    speed *= 0.35 if run.algorithm == "joint-absolute" and run.offset != "none" else 1.0
    speed *= 0.1 if run.task == DOCSTRINGS else 1.0
    efficiency = rng_of_seed.normal(0.75, 0.02) - 0.02 * math.log(run.learning_rate / 1.5e-4)
    offset_harm = {"none": 0.0, "learnable": 0.05, "unlearnable": 0.5}[run.offset] if run.algorithm == "ppo" else 0.0
    seen = plan.replace(run, offset="none", offset_sd=0.0) if run.algorithm in plan.CLIPPINGS else run
    evaluations = []
    for step in UPDATES:
        kl = max(0.0, speed * (1 - math.exp(-step / 15)) + (speed * noise.normal(0, 0.006) if step else 0))
        gain = (efficiency - offset_harm) * best(kl) + (noise.normal(0, 0.02) if step else 0)
        evaluation = {"step": step, "reward": 10.0 + gain, "reward_std": 1.0 + run.offset_sd, "kl": kl, "kl_std": 1.0}
        evaluation |= {name: run.reward_factor * evaluation[name] for name in ("reward", "reward_std")}
        evaluation |= {"response_length": 20.0, "missing_eos": 0.001, "prompts": 128}
        if run.task != DOCSTRINGS:
            evaluation |= {"gold": 3 + 0.8 * gain, "gold_std": 1.0}
        evaluations.append(evaluation)
    weights = hashlib.sha256(seen.name.encode()).hexdigest()
    responses = run.prompts_per_update * run.responses_per_prompt
    costs = {"seconds": responses**0.5, "response_tokens": 13.0 * responses}
    costs = {name: [a_step * step for step in UPDATES] for name, a_step in costs.items()}
    return asdict(run) | {"sha256": weights, "seconds": 25.0, "evaluations": evaluations, "costs": costs}


@pytest.fixture(scope="module")
def lines():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "chosen_rates", lambda: RATES)
        patch.setattr(tuning, "tuned", lambda: TUNED)
        runs = dict.fromkeys(
            run
            for group, asked in parts.PLAN.items()
            if group != MANY_LANGUAGES
            for part in asked.values()
            for run in part(group)
        )
    # Of long prompts two algorithms are enough to see what tables make of them.
    return [record(run) for run in runs if not run.task.startswith(LONG_PROMPTS) or run.algorithm in ("joint", "ppo")]


def study_of(lines, rates=RATES, tuned=TUNED) -> Study:
    return Study(to_frames(lines), rates, tuned)


@pytest.fixture(scope="module")
def study(lines):
    return study_of(lines)


@pytest.fixture(scope="module")
def optimum(lines):
    curve = [{"kl": kl, "reward_gain": best(kl), "ess": 500 / math.exp(kl / 2)} for kl in np.linspace(0.1, 8, 80)]
    return dict.fromkeys({run["task"] for run in lines}, curve)


EMPTY = study_of([], {}, {})


def without(lines: list[dict], **dropped) -> Study:
    return study_of([run for run in lines if any(run[key] != value for key, value in dropped.items())])


def changed(lines: list[dict], change, **wanted) -> Study:
    """Evaluations of the wanted runs, each replaced by what `change` makes of it."""
    runs = []
    for run in lines:
        if all(run[key] == value for key, value in wanted.items()):
            run = run | {"evaluations": [evaluation | change(evaluation) for evaluation in run["evaluations"]]}
        runs.append(run)
    return study_of(runs)


def verdict(study, optimum, number):
    return acceptance.checked_rules(study, optimum)[number].verdict


def assert_same(records, others):
    assert_frame_equal(records.runs, others.runs)
    assert_frame_equal(records.evaluations, others.evaluations)


def test_runs_and_rates_are_read_and_a_run_recorded_twice_is_refused(lines, tmp_path, monkeypatch):
    monkeypatch.setattr(plan, "SETTINGS", tmp_path / "settings.json")
    path = tmp_path / "runs.jsonl"
    assert_same(records.load(path), EMPTY.records)
    assert plan.chosen_rates() == EMPTY.rates
    (tmp_path / "settings.json").write_text(json.dumps(RATES))
    assert plan.chosen_rates() == RATES
    written = [json.dumps(run) + "\n" for run in lines[:3]]
    path.write_text("".join(written))
    assert_same(records.load(path), to_frames(lines[:3]))
    path.write_text("".join(written + written[:1]))
    with pytest.raises(ValueError, match="two runs"):
        records.load(path)


def test_seeds_that_chose_the_learning_rate_are_in_no_arm_of_the_results(study):
    for group in STUDIED:
        for arm in comparisons.ARMS:
            assert set(study.runs_of(group, arm).index.get_level_values("seed")) <= set(plan.SEEDS)
    chosen = study.runs_of("languages", Arm("ppo"))
    assert len(chosen) == len(plan.SEEDS)
    about = chosen[["learning_rate", "offset", "kl_coef"]].itertuples(index=False, name=None)
    assert set(about) == {(1.5e-4, "none", 0.03)}
    tried = study.runs_of("languages", Arm("ppo", learning_rate=6e-4), selection=True)
    assert set(tried.index.get_level_values("seed")) == set(plan.SELECTION_SEEDS["languages"])


def test_every_arm_of_the_plan_is_in_a_table_with_its_gains(study):
    levels = comparisons.levels(study, "languages")
    assert levels[0][-3:] == ["at KL 1", "at KL 2", "at KL 4"]
    assert len(levels) == 1 + 2 * len(comparisons.ARMS)
    assert not any(cells.NOT_MEASURED in line for line in levels)
    joint = next(line for line in levels if line[:3] == ["joint", "3e-4", "none"] and line[5] == "proxy")
    assert joint[-1].endswith("(8)")
    assert float(joint[-1][:4]) == pytest.approx(0.736 * best(4), abs=0.1)


def test_differences_are_paired_and_corrected_for_all_in_the_table(study):
    differences, count = comparisons.differences(study, "languages")
    assert count == sum(cell.endswith(")") for line in differences[1:] for cell in line[2:])
    drop = comparisons.Comparison("", Arm("ppo", "unlearnable"), Arm("ppo"))
    alone = comparisons.difference(study, "languages", drop, 2.0, "reward")
    corrected = comparisons.difference(study, "languages", drop, 2.0, "reward", count)
    assert alone.mean == pytest.approx(-0.5 * best(2), abs=0.05)
    assert corrected.low < alone.low < alone.high < corrected.high < 0
    single, together = (cells.estimate(one, signed=True).removesuffix(" (8)") for one in (alone, corrected))
    limits = together.removeprefix(cells.number(corrected.mean, signed=True))
    assert f"{single}, together{limits}* (8)" in [cell for line in differences for cell in line]


def test_docstrings_are_compared_only_where_most_seeds_of_every_algorithm_are(study):
    assert comparisons.matched_kls(study, DOCSTRINGS) == (0.1, 0.2)
    assert comparisons.matched_kls(EMPTY, DOCSTRINGS) == ()


def test_learning_rates_tell_selection_from_results(study):
    table = learning_rates.table(study, "languages")
    result_rates = ["7.5e-5", "**1.5e-4**", "3e-4"]
    assert [line[1] for line in table if line[0] == "ppo"] == [*result_rates, "6e-4", "1.2e-3", *result_rates]
    assert {line[2]: line[3] for line in table if line[:2] == ["ppo", "3e-4"]} == {"selection": "2", "results": "8"}
    spreads = learning_rates.spreads(study, "languages")
    assert spreads[0] == ["KL", *plan.ALGORITHMS, "algorithms"]
    assert all(float(cell) > 0 for cell in spreads[1][1:])


def test_ends_of_runs(study):
    none, joint = (
        next(line for line in endpoints.clipping(study, "languages") if line[0] == n) for n in ("none", "joint")
    )
    assert len(none[1].split(", ")) == 8
    assert float(none[2].split()[0]) > 1.3 * float(joint[2].split()[0])
    final = {tuple(line[:2]): float(line[2].split()[0]) for line in endpoints.scaling(study, "languages")[1:]}
    assert final["joint-absolute", "unlearnable"] < 0.5 * final["joint", "unlearnable"]
    swept = endpoints.kl_coefs(study, DOCSTRINGS)
    assert swept[0][2:] == ["final KL", "final gain, proxy", "gain at KL 0.1", "gain at KL 0.2"], "no gold utility"
    assert [line[1] for line in swept if line[0] == "dpo"] == ["0.1", "0.3", "1"]
    assert all("[" in line[1] for line in endpoints.fitted_lines(study, "languages")[1:])


def test_the_envelope_takes_the_setting_of_each_kl_as_a_share_of_the_optimum(study, optimum):
    table = envelope.table(study, optimum)
    assert len(table) == 1 + len(plan.EVERYONE) * len(tuning.ENVELOPE_KLS)
    grpo = {line[0]: line for line in table if line[1] == "grpo"}
    assert [grpo[kl][2:7] for kl in ("1", "2")] == [["4", "", "3e-4", coef, "8"] for coef in ("0.3", "0.1")]
    assert float(grpo["2"][-1][:4]) == pytest.approx(0.75 - 0.02 * math.log(2), abs=0.05)
    assert [line[3] for line in table if line[1] == "rebel"] == ["1", "3"]
    differences, count = envelope.differences(study)
    assert len(differences) == 1 + (len(plan.EVERYONE) - 1) * len(tuning.ENVELOPE_KLS)
    assert count == sum(cell.endswith(")") for line in differences[1:] for cell in line[2:4])
    assert {line[-3] for line in envelope.trials(study)[1:]} != {cells.NOT_MEASURED}
    assert [line[0] for line in envelope.in_fours(study)[1:]] == list(plan.PUBLISHED)
    crossing = sum(line[-2].endswith(f"({line[5]})") for line in envelope.trials(study)[1:])
    assert envelope.slowness(study, 1.0).endswith(f"({crossing})")
    assert envelope.slowness(EMPTY, 1.0) == cells.NOT_MEASURED


def test_what_training_maximises_is_compared_at_the_end_of_runs_with_one_coefficient(lines, study):
    table = objective.table(study)
    assert {line[2] for line in table[1:] if line[:2] == ["languages", "2"]} == {"joint", "separate", "none", "ppo"}
    ppo = study.runs_of("languages", Arm("ppo", kl_coef=0.1))
    values = objective.at_the_end(study, "languages", Arm("ppo", kl_coef=0.1))
    assert values.tolist() == (ppo["final_reward"] - 0.1 * ppo["final_kl"]).tolist()
    differences, count = objective.differences(study)
    assert count == len(differences) - 1
    assert all(line[2].startswith("joint − ") for line in differences[1:])
    further = changed(lines, lambda e: {"kl": e["kl"] + (e["step"] > 0)}, algorithm="ppo")
    (before,), (after,) = (
        [line for line in objective.differences(s)[0] if line[:3] == ["languages", "2", "joint − ppo"]]
        for s in (study, further)
    )
    assert float(after[3].split()[0]) - float(before[3].split()[0]) == pytest.approx(0.1, abs=0.011)


def test_questions_compare_each_value_with_the_default_or_algorithms_at_each_value(study):
    clip, factor, labels, sizes = questions.questions(study)
    values = {name: [line[1] for line in questions.table(study, clip) if line[0] == name] for name in ("joint", "ppo")}
    assert values["joint"] == values["ppo"] == ["0.05", "0.1", "0.2", "0.5", "1"]
    compared = [line[0] for line in questions.differences(study, clip)[0]]
    assert compared[1:5] == [f"joint: {value} − 0.2" for value in ("0.05", "0.1", "0.5", "1")]
    assert compared[-4:] == [f"joint with 0.2 − grpo with {value}" for value in ("0.05", "0.1", "0.2", "0.5")]
    larger = next(line for line in questions.table(study, factor) if line[:2] == ["joint", "10"])
    plain = next(line for line in questions.table(study, factor) if line[:2] == ["joint", "1"])
    assert float(larger[5][:4]) == pytest.approx(float(plain[5][:4]), abs=0.1)
    assert [line[0] for line in questions.differences(study, labels)[0][1:]] == [
        f"joint − {rival}, wrong labels {share}" for share in ("0.05", "0.2", "0.35") for rival in ("ppo", "dpo")
    ]
    of_ppo = [line[1:4] for line in questions.table(study, sizes) if line[0] == "ppo"]
    assert of_ppo == [
        ["100,000", "3e-4", "8"],
        ["1,000,000", "1.5e-4", "8"],
        ["1,000,000", "3e-4", "4"],
        ["6,000,000", "7.5e-5", "8"],
        ["6,000,000", "1.5e-4", "8"],
    ]
    assert "joint − ppo, parameters 1,000,000, 0.5 of the rate" in sizes.pairs


def test_more_responses_are_compared_where_runs_had_cost_the_same(study):
    budgets = equal_cost.budgets(study, equal_cost.arms(study))
    assert budgets["seconds"] == pytest.approx(40 * 128**0.5)
    tokens = {k: 40 * prompts * (122 + 13 * k) for k, prompts in equal_cost.EQUAL_TOKENS.items()}
    assert budgets["tokens"] == pytest.approx(min(tokens.values()))
    arm = equal_cost.arm_of(study, "joint", 16)
    halves = [equal_cost.at_cost(study, arm, cost, tokens[16] / 2, "kl") for cost in ("tokens",)]
    kls = study.evaluations_of(study.runs_of(LONG_PROMPTS, arm))["kl"].unstack("step")
    assert halves[0].tolist() == pytest.approx(kls[20].loc[study.runs_of(LONG_PROMPTS, arm)["name"]].tolist())
    assert equal_cost.at_cost(study, arm, "tokens", 2 * tokens[16], "kl").isna().all()
    table = equal_cost.table(study)
    assert len(table) == 1 + 2 * 4
    assert [line[5] for line in table[1:5]] == [f"{value / 40 / 1000:.1f}" for value in tokens.values()]
    lines, count = equal_cost.differences(study, equal_cost.more_responses(study))
    assert len(lines) == 1 + 2 * 3
    assert count == sum("(" in cell for line in lines[1:] for cell in line[1:])
    lines, _ = equal_cost.differences(study, equal_cost.rivals(study))
    assert [line[0] for line in lines[1:]] == [f"joint − ppo, K {k}" for k in (2, 4, 8, 16)]


def test_every_run_is_listed(study):
    table = tables.every_run(study.records)
    assert len(table) == 1 + len(study.records.runs)
    assert all(len(line) == len(table[0]) for line in table)


def test_made_up_runs_pass_as_they_were_made(lines, study, optimum):
    assert [rule.verdict for rule in acceptance.checked_rules(study, optimum)] == [
        "pass",
        "not measured",  # too few of PPO's seeds reach KL 4
        "not measured",
        "pass",
        "fail",  # clipping makes no difference at matched KL
        "pass",
        "pass",
    ]
    far = changed(lines, lambda e: {"kl": 2 * e["kl"]}, algorithm="ppo")
    assert verdict(far, optimum, 1) == "pass"
    assert verdict(far, optimum, 2) == "pass"
    gained = changed(
        lines,
        lambda e: {"reward": e["reward"] + 0.2 * e["kl"]},
        algorithm="joint",
        learning_rate=plan.HIGH_LEARNING_RATE,
    )
    assert verdict(gained, optimum, 4) == "pass"


def test_each_rule_can_fail(lines, optimum):
    other = [run | {"sha256": "0"} if run["algorithm"] == "none" and run["seed"] == 0 else run for run in lines]
    for run in other:
        if run["sha256"] == "0" and run["offset"] != "none":
            run["sha256"] = "1"
    assert verdict(study_of(other), optimum, 0) == "fail"
    worse = changed(lines, lambda e: {"reward": e["reward"] - 0.2 * e["kl"]}, algorithm="joint")
    assert verdict(worse, optimum, 3) == "fail"
    few = study_of([run for run in lines if run["seed"] in plan.SEEDS])
    assert verdict(few, optimum, 3) == "not measured"
    faster = changed(lines, lambda e: {"kl": 2 * e["kl"]}, algorithm="joint", learning_rate=plan.HIGH_LEARNING_RATE)
    assert verdict(faster, optimum, 4) == "fail"
    assert verdict(changed(lines, lambda e: {"missing_eos": 0.03}, algorithm="dpo"), optimum, 6) == "fail"


def test_an_evaluation_above_the_optimum_is_named(lines, study, optimum):
    compared = sanity.held_against_optimum(study.records, optimum)
    assert len(compared) > 1000
    assert sanity.above_optimum(compared).empty
    lucky = next(run for run in lines if run["offset"] == "unlearnable" and run["algorithm"] == "joint")
    better = [e | {"reward": e["reward"] + (e["step"] == 3) * 2.0} for e in lucky["evaluations"]]
    runs = [run | {"evaluations": better} if run is lucky else run for run in lines]
    better = study_of(runs)
    (above,) = sanity.above_optimum(sanity.held_against_optimum(better.records, optimum)).itertuples()
    assert (above.run, above.step) == (to_frames([lucky]).runs["name"].item(), 3)
    assert above.errors > 10, "the offset's spread is no error of a gain"
    assert verdict(better, optimum, 5) == "fail"
    assert sanity.held_against_optimum(better.records, {}).empty
    uncertain = {task: [point | {"ess": 29.0} for point in points] for task, points in optimum.items()}
    assert sanity.held_against_optimum(better.records, uncertain).empty


def test_nothing_is_invented_where_nothing_was_measured(optimum):
    assert {rule.verdict for rule in acceptance.checked_rules(EMPTY, optimum)} == {"not measured"}
    text = tables.tables_page(EMPTY, {})
    assert not re.search(r"\[[+−]?\d+\.", text), "no interval"
    assert "not measured" in text


def test_missing_arms_and_seeds_leave_the_others(lines, optimum):
    dropped = {"algorithm": "dpo", "offset": "unlearnable", "task": DOCSTRINGS, "seed": 3}
    left = [run for run in lines if all(run[key] != value for key, value in dropped.items())]
    text = tables.tables_page(study_of(left), optimum)
    assert "(7)" in text
    assert "not measured" in text


@pytest.mark.nightly
@pytest.mark.parametrize(
    "dropped", [{"algorithm": "dpo"}, {"offset": "unlearnable"}, {"task": "docstrings"}, {"seed": 3}], ids=str
)
def test_each_missing_arm_leaves_the_others(lines, optimum, dropped):
    text = tables.tables_page(without(lines, **dropped), optimum)
    assert "(7)" in text if "seed" in dropped else "not measured" in text


def test_numbers_are_short_and_plain():
    assert [cells.rate(value) for value in (3e-4, 1.5e-4, 3.75e-5)] == ["3e-4", "1.5e-4", "3.75e-5"]
    assert [cells.number(-0.001, signed=True), cells.number(-1.5)] == ["+0.00", "−1.50"]
    seeds = MultiIndex.from_tuples([("a", 0), ("a", 1)], names=records.SEED)
    assert cells.mean(Series([math.nan] * 2, seeds)) == cells.NOT_REACHED
    assert cells.mean(Series([], seeds[:0], dtype=float)) == cells.NOT_MEASURED
    assert cells.mean(Series([1.0, 2.0], seeds)) == "1.50 (2)"


def test_figures_are_drawn_from_what_there_is(lines, study, optimum, tmp_path):
    path = tmp_path / "figure.png"
    rates = [
        {
            "task": "docstrings",
            "first": "joint",
            "second": "sft",
            "by": "reward",
            "equal_kl": equal_kl,
            "win_rate": 0.7,
            "first_kl": 2.0,
            "second_kl": 0.0,
        }
        for equal_kl in (None, 4.0)
    ]
    drawn = [
        figures.frontier(study, optimum, path),
        figures.frontier(without(lines, algorithm="ppo"), {}, path),
        figures.offset(study, path),
        figures.kl_coefs(study, path),
        figures.clipping(study, path),
        figures.learning_rates(study, path),
        figures.win_rates([rate | {"low": 0.6, "high": 0.8} for rate in rates], path),
        tuned_figures.envelope(study, optimum, path),
        tuned_figures.envelope(without(lines, algorithm="ppo"), {}, path),
        tuned_figures.one_setting_at_a_time(study, path),
        tuned_figures.by_responses(without(lines, responses_per_prompt=8), path),
    ]
    assert all(drawn)
    assert matplotlib.image.imread(path).std() > 0
    assert not figures.frontier(EMPTY, optimum, path)
    drawings = (figures.offset, figures.kl_coefs, figures.clipping, figures.learning_rates, readme_plot.draw)
    assert not any(draw(EMPTY, path) for draw in drawings)
    assert not figures.win_rates([], path)
    assert not tuned_figures.envelope(EMPTY, optimum, path)
    assert not any(draw(EMPTY, path) for draw in (tuned_figures.one_setting_at_a_time, tuned_figures.by_responses))


def test_the_committed_tables_are_those_of_the_committed_runs():
    study = load_study()
    optimum = json.loads(records.read(records.RESULTS / "optimum.json"))
    assert tables.tables_page(study, optimum) == tables.TABLES.read_text()
    assert tables.all_runs_page(study) == tables.ALL_RUNS.read_text()
    assert tables.ALL_RUNS.read_text().count("\n| ") == len(study.records.runs) + 2
    assert readme_plot.summary(readme_plot.ends(study)) in README_PLOT.read_text()
    assert markdown(verdicts.table(study)) in verdicts.README.read_text()


def test_committed_runs_of_a_task_and_a_seed_began_alike():
    """Reward models that were made on different machines would show here: their runs must not be paired."""
    recorded = records.load(records.RESULTS / "runs.jsonl")
    plain = recorded.runs[recorded.runs["offset"] == "none"]
    starts = recorded.evaluations[recorded.evaluations["step"] == 0].merge(plain, left_on="run", right_on="name")
    rewards = starts.groupby(records.SEED)["reward"]
    assert len(rewards) > 20
    assert (rewards.max() - rewards.min()).max() < 1e-5
