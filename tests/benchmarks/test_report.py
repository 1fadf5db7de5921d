"""Verdicts on made-up results, and pages that are what the committed results give."""

import re
from pathlib import Path

import pytest

from benchmarks import report
from benchmarks.goals import CPU, GOALS, GPU
from benchmarks.markdown import between_markers
from benchmarks.pages import gpu, machines, sections, sources
from benchmarks.records import CPU_RECORDS, GPU_RECORD, NOT_MEASURED, PRODUCTS

ROOT = Path(__file__).parents[2]
RECORDS = sources.records()


def result(
    level="hidden",
    implementation="fastp3o",
    passes="forward and backward",
    N=8192,
    ratio=1.0,
    ms=10.0,
    **more,
):
    shape = {"N": N, "D": 4096, "V": 128256, "dtype": "float32", "cuda": True}
    figures = {"ratio_to_bare": ratio, "ms": ms, "extra_gb": None}
    return {
        "level": level,
        "implementation": implementation,
        "passes": passes,
        **shape,
        **figures,
        **more,
    }


def verdict(results, what, goal="", device=GPU):
    (found,) = [
        one
        for one in GOALS
        if one.device == device and one.what.startswith(what) and goal in one.goal
    ]
    return found.verdict(results)


def test_the_worst_head_counts_against_peers_of_its_shape_and_nothing_measured_is_said_so():
    assert {goal.verdict([]) for goal in GOALS} == {(NOT_MEASURED, NOT_MEASURED)}
    results = [result(ratio=1.08), result(ratio=1.21, N=32768)]
    assert verdict(results, "P3O's loss from hidden") == ("1.21 ×", "not met")
    assert verdict(results[:1], "P3O's loss from hidden") == ("1.08 ×", "met")
    # Peers are compared at the same shape.
    results = [
        result(ratio=1.1),
        result(implementation="TRL", ratio=1.43),
        result(implementation="TRL", N=32768),
    ]
    assert verdict(results, "the same", "twice") == ("1.30 ×", "met")
    results.append(result(implementation="torch.compile", ratio=0.99))
    assert verdict(results, "the same", "never slower") == ("0.90 ×", "not met")
    assert verdict(results, "the same, larger V") == (NOT_MEASURED, NOT_MEASURED)
    assert verdict([*results, result(V=256000, ratio=1.18)], "the same, larger V") == (
        "1.18 ×",
        "not met",
    )


def test_linear_logprobs_are_judged_beside_trls_in_time_and_memory():
    ours, trl = (
        result(implementation=name, ratio=1.3, extra_gb=2.0)
        for name in ("fastp3o linear_logprobs", "TRL")
    )
    assert verdict([ours, trl | {"ratio_to_bare": 1.43}], "`linear_logprobs`") == ("1.10 ×", "met")
    assert verdict([ours, trl], "the same", "never larger") == ("1.00 ×", "met")
    assert verdict([ours, trl | {"extra_gb": 1.0}], "the same", "never larger") == (
        "2.00 ×",
        "not met",
    )


def test_a_run_must_raise_its_reward():
    run = {"level": "training run", "cuda": True, "rewards": [0.50, 0.40, 0.62]}
    assert verdict([run], "reward of a run") == ("+0.12", "met")
    assert verdict([run, run | {"rewards": [0.5, 0.9, 0.52]}], "reward of a run") == (
        "+0.02",
        "not met",
    )


def test_memory_is_judged_by_the_gradient_of_all_logits_or_the_budget_with_a_sum_in_fp32():
    few, many = 2 * 8192 * 128256 / 1e9, 4 + 2 * 4096 * 128256 / 1e9
    assert verdict([result(extra_gb=few)], "extra memory") == ("1.00 ×", "met")
    assert verdict([result(N=65536, extra_gb=many)], "extra memory") == ("1.00 ×", "met")
    assert (
        verdict([result(extra_gb=1.1 * few), result(N=65536, extra_gb=many)], "extra memory").met
        == "not met"
    )


def rollouts(ratio, K=2, cuda=False, **more):
    ways = {"generate": {"ratio": 1.0}, "fastp3o engine": {"ratio": ratio} | more}
    shape = {"D": 2048, "prompt": 350, "response": 40, "mean": None, "K": K} if cuda else {"K": K}
    return {"level": "rollouts", "implementation": "fastp3o", "cuda": cuda, "ways": ways} | shape


def test_rollouts_are_judged_by_the_device_of_the_goal():
    results = [rollouts(1.2), rollouts(0.9, K=4), rollouts(0.2, cuda=True, floor_ms=30.0, ms=40.0)]
    assert verdict(results, "rollouts, any shape", device=CPU) == ("0.90 ×", "not met")
    assert verdict(results, "rollouts, 128 responses") == ("75%", "met")
    assert verdict(results, "rollouts, ragged", device=CPU) == (NOT_MEASURED, NOT_MEASURED)


@pytest.mark.parametrize("goal", GOALS, ids=lambda goal: f"{goal.device}: {goal.what}, {goal.goal}")
def test_no_goal_reads_a_result_of_another_device(goal):
    """The same results, but ten times worse or better, from the other device: they change no
    verdict.
    """
    own = sources.results(RECORDS, goal.device)
    alone = goal.verdict(own)
    for factor in (0.1, 10):
        others = [scaled(one, factor) | {"cuda": not one["cuda"]} for one in own]
        assert goal.verdict(others + own) == goal.verdict(own + others) == alone
        assert goal.verdict(others) == (NOT_MEASURED, NOT_MEASURED)


# What says which measurement it is, rather than what was measured.
SHAPE = {
    "N",
    "D",
    "V",
    "K",
    "P",
    "prompt",
    "response",
    "mean",
    "layers",
    "turns",
    "turn",
    "observation",
    "warps",
}
SHAPE |= {"seed", "step", "tokens", "bytes", "gradient_bytes", "epochs", "spills"}


def scaled(value, factor, key=""):
    """All measured numbers of a record, times the factor, which grows from one entry to the next."""
    if isinstance(value, dict):
        return {
            name: scaled(one, factor * (1 + place / 10), name)
            for place, (name, one) in enumerate(value.items())
        }
    if isinstance(value, list):
        return [scaled(one, factor * (1 + place / 10), key) for place, one in enumerate(value)]
    measured = isinstance(value, int | float) and not isinstance(value, bool) and key not in SHAPE
    return value * factor if measured else value


def changed(name: str) -> sources.Records:
    """The records, of which this one has other numbers, of the same machine."""
    record = scaled(RECORDS[name], 3)
    if "environment" in record:
        record["environment"] = RECORDS[name]["environment"]
    return RECORDS | {name: record}


SECTIONS = [(page, name) for page, found in sections.SECTIONS.items() for name in found]
# Those that no record gives are predicted by formulas.
SOURCES = {
    "served": ["served.json"],
    "turns": ["turns.json"],
    "update launches": ["update_counts.json"],
    "log-probs launches": ["update_counts.json"],
    "layers": ["layer_traffic.json"],
    "fused": ["layer_traffic.json"],
    "compiled": ["compiled_kernels.json"],
    "registers": ["compiled_kernels.json"],
    "precision": ["policy_precision.json"],
    "lengths": ["rounding_by_length.json"],
    "trpo": ["trpo.json"],
    "seeds": [sources.SEEDS],
    "exploited": [sources.EXPLOITED],
    "human": ["human_preferences.json"],
    "human win rate": ["human_preferences.json"],
    "human accuracies": ["human_preferences.json"],
    "human offsets": ["human_preferences.json"],
    "human kinds": ["human_preferences.json"],
    "films": ["film_reviews.json"],
    "films win rate": ["film_reviews.json"],
    "films accuracies": ["film_reviews.json"],
    "alpaca_eval": ["alpaca_eval.json"],
    "alpaca_eval kinds": ["alpaca_eval.json"],
    "alpaca_eval length": ["alpaca_eval.json"],
    "game": ["game.json"],
    "critic": ["game.json"],
    "rewards by turn": ["game.json"],
    "cpu": [name for name in CPU_RECORDS if name != PRODUCTS],
    "chosen": [PRODUCTS],
    "goals": [GPU_RECORD, *CPU_RECORDS],
}
SOURCES |= {
    name: [GPU_RECORD]
    for name in ("products", "head", "gpu", "modeled", "measured", "memory", "h100", "in trl")
}


@pytest.mark.parametrize("page", sections.SECTIONS)
def test_a_page_is_what_the_committed_records_give(page):
    hint = "run: python -m benchmarks.report --write"
    assert sections.written(page, RECORDS) == (ROOT / page).read_text(), hint


@pytest.mark.parametrize(("page", "name"), SECTIONS)
def test_a_changed_record_changes_each_row_of_the_page_that_is_of_it(page, name):
    section = sections.SECTIONS[page][name]
    before = section(RECORDS)
    if name in ("devices", "fits", "gallery", "options", "predicted", "turns machine"):
        return
    after = before
    for source in SOURCES[name]:
        once = section(changed(source))
        assert once != before or name == "goals", source
        after = merged_rows(before, once, after)
    rows = [row for row in before.splitlines()[2:] if row.startswith("|")]
    if name == "modeled":
        rows = [row for row in rows if "measured" in row]
    left = [row for row in rows if row in after.splitlines() and NOT_MEASURED not in row]
    assert not left


def merged_rows(before: str, once: str, after: str) -> str:
    """The rows that any of the changes changed."""
    rows = zip(before.splitlines(), once.splitlines(), after.splitlines(), strict=True)
    return "\n".join(new if new != old else known for old, new, known in rows)


@pytest.mark.parametrize(("page", "name"), SECTIONS)
def test_what_a_record_lacks_is_not_measured(page, name):
    empty = {file: RECORDS[file] | {"benchmarks": []} for file in (GPU_RECORD, *CPU_RECORDS)}
    found = sections.SECTIONS[page][name](RECORDS | empty)
    needs = {file for file in SOURCES.get(name, ()) if file in empty}
    assert NOT_MEASURED in found or not needs or name == "h100"


def test_the_report_prints_the_goals_of_the_page():
    printed = re.sub(r" +", " ", report.committed())
    assert "nan" not in printed
    page = machines.goals(RECORDS)
    assert page in (ROOT / "benchmarks/README.md").read_text()
    for row in page.splitlines()[2:]:
        assert " ".join(row.strip("| ").replace(" | ", " ").split()) in printed


def test_a_way_that_was_absent_has_its_row():
    sampled = RECORDS["rollouts.cpu.json"]["benchmarks"]
    way = {"TRL GRPO": {"absent": "not installed"}}
    for on_gpu in ({}, {"launches_per_step": 1.0}):
        engine = {"fastp3o engine": sampled[0]["ways"]["fastp3o engine"] | on_gpu}
        header, *rows = report.rollouts([sampled[0] | {"ways": engine | way}])
        assert {len(row) for row in rows} == {len(header)}
        assert "absent: not installed" in report.plain([header, *rows])


def test_what_a_gpu_could_not_run_says_why_in_its_row():
    name = "test_forward_and_backward[8192-HeadSizes(hidden=4096, vocabulary=128256)-QuACK cross-entropy-bfloat16]"
    record = RECORDS[GPU_RECORD]
    for reason, said in (
        ("absent: no module", "not measured: no module"),
        ("out of time: 9 seconds", NOT_MEASURED),
    ):
        entries = {"not_measured": [{"name": name, "reason": reason}]}
        (row,) = [
            line
            for line in gpu.head({GPU_RECORD: record | entries}).splitlines()
            if "QuACK" in line
        ]
        assert row.split(" | ")[1] == said


def test_the_body_a_run_and_an_iteration_have_their_rows():
    shape = {"D": 2048, "V": 128256, "layers": 16, "P": 64, "K": 4, "prompt": 350, "response": 40}
    passes = "update, prompts of 350, 2 responses of 40"
    run = {"rollout_s": 0.5, "reward_s": 0.0, "logprobs_s": 0.25, "update_s": 1.0}
    run |= {"rewards": [0.5, 0.75], "peak_gb": 30.0, "predicted_gb": 29.0}
    results = [
        {"level": "layers", "implementation": f"fastp3o {way} layers", "passes": passes}
        for way in WAYS
    ]
    results = [one | {"ms": 9.0, "ratio_to_bare": 2.25, "extra_gb": None} for one in results]
    kernels = {"launches": 2000, "gpu_ms": 8.0, "kernels": [["product", 9, 4.0]]}
    results.append({"level": "kernels", "implementation": "fastp3o"} | kernels)
    results.append(
        {
            "level": "engine",
            "implementation": "fastp3o",
            "ms": 9.0,
            "prefill_ms": 4.0,
            "decode_ms": 5.0,
        }
    )
    results.append({"level": "training run", "implementation": "fastp3o"} | shape | run)
    trainers = {"fastp3o": {"seconds": 1.5}, "TRL GRPO": {"ratio": 5.0}}
    results.append({"level": "iteration", "model": "policy", "trainers": trainers} | shape)
    page = gpu.others({GPU_RECORD: RECORDS[GPU_RECORD] | {"benchmarks": results}})
    for row in (
        "plain 2.25, compiled 2.25",
        "2,000",
        "0.50 to 0.75; 30.0, 29.0",
        "1: 1.50 s | TRL's GRPO 5.00",
    ):
        assert row in page
    for table in (report.body(results), report.kernels(results), report.training_runs(results)):
        assert len(table) > 1
        assert {len(line) for line in table} == {len(table[0])}


def test_tests_that_failed_on_a_gpu_are_named_and_an_old_record_says_that_it_lacks_them():
    failed = [{"name": f"test_a[{K}]", "reason": "failed"} for K in (2, 4)]
    old = {"not_measured": [*failed, {"name": "test_b", "reason": "absent: CCE"}]}
    assert (
        machines.tests_passed(old)
        == "How many tests passed there is not recorded, 2 failed (`test_a`)"
    )
    found = machines.tests_passed({"tests": {"passed": 1624, "failed": ["tests/a.py::test_b"]}})
    assert found == "1,624 tests passed there, 1 failed (`test_b`)"
    assert (
        machines.tests_passed({"tests": {"passed": 3, "failed": []}})
        == "3 tests passed there, 0 failed"
    )


WAYS = ("plain", "compiled")
# A figure with the unit of a measurement.
FIGURE = re.compile(r"\d ?(?:ms|MB|TFLOP/s|GB/s)\b|\d\.\d+ ?×|\d%|\d tokens a second")
PREDICTED = re.compile(r"(?i)predict|model|assume|goal|published|by others|by count")


@pytest.mark.parametrize(
    "page", ["benchmarks/README.md", "benchmarks/NOTES.md", "fastp3o/training/precision.md"]
)
def test_a_paragraph_with_figures_is_generated_or_says_that_they_are_predicted(page):
    text = re.sub(
        r"<!-- ([\w -]+) -->.*?<!-- /\1 -->", "", (ROOT / page).read_text(), flags=re.DOTALL
    )
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    for section in text.split("\n## "):
        for paragraph in section.split("\n\n"):
            if FIGURE.search(paragraph):
                assert (
                    PREDICTED.search(section.partition("\n")[0] + paragraph)
                    or "predicted |" in section
                ), paragraph


def test_runs_with_faults_add_up():
    page = (ROOT / "benchmarks/README.md").read_text()
    text = page.partition("## Faults")[2].partition("## Bad inputs")[0]
    cells = [
        re.findall(r"\d+", cell)
        for row in re.findall(r"^\| .* \|$", text, re.M)
        for cell in row.split("|")[2:4]
    ]
    runs = sum(int(number) for cell in cells for number in cell)
    refused = sum(
        map(int, re.findall(r"\d+", re.search(r"refused with the file's name \|(.*)\|", text)[1]))
    )
    others = int(re.search(r"one process alone goes on.*\|\s*(\d+) \|", text)[1])
    same = runs - refused - others
    assert f"of {runs:,} runs\n{same:,} did" in text
    assert f"{refused} had no undamaged state" in text
    assert f"and {others} went on with another number of processes" in text
    assert same > 1500
    assert f"[{runs:,} such runs]" in (ROOT / "README.md").read_text()


def test_a_section_within_a_line_does_not_begin_it():
    assert between_markers("- a <!-- x -->1<!-- /x -->.", "x", "2") == "- a <!-- x -->2<!-- /x -->."
    assert between_markers("<!-- x -->\n1\n<!-- /x -->", "x", "2") == "<!-- x -->\n2\n<!-- /x -->"
    for text in ("<!-- x -->1<!-- /x -->", "- <!-- x -->1<!-- /x -->", "none"):
        with pytest.raises(ValueError, match="x"):
            between_markers(text, "x", "2")
