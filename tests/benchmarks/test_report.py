import json
import re
import shutil
from pathlib import Path

import pytest

from benchmarks import report
from tests.benchmarks.results import result

ROOT = Path(__file__).parents[2]


@pytest.fixture
def record():
    rates = {"gb_per_s": None, "tflop_per_s": 500.0, "bare_ms": 9.0}
    results = [
        result(ms=12.345, extra_gb=0.96, **rates),
        result(ms=40.0, N=32768, extra_gb=2.0, **rates),
        result(implementation="TRL", ms=15.0, extra_gb=1.5, **rates),
        result(passes="forward and backward, a third clipped", **rates),
    ]
    environment = {"device": "a GPU", "packages": {"torch": "2.13.0", "trl": None}, "date": "2026-01-01"}
    missing = [{"name": f"test_a[{i}]", "reason": "absent: no module"} for i in range(2)]
    return {"environment": environment, "benchmarks": results, "not_measured": missing}


def test_what_stands_around_the_markers_stays():
    text = "before\n<!-- x -->\nold\n<!-- /x -->\nafter"
    assert report.between_markers(text, "x", "new") == "before\n<!-- x -->\nnew\n<!-- /x -->\nafter"
    with pytest.raises(ValueError, match="the text has no"):
        report.between_markers("no markers", "x", "new")


def test_what_is_committed_is_what_the_results_give():
    written = report.PRECISION_PAGE.read_text()
    precision = report.precision_section(report.load(report.RESULTS / "policy_precision.json"))
    assert report.between_markers(written, "precision", precision) == written
    written = report.README.read_text()
    assert report.between_markers(written, "gpu", report.gpu_sentence(report.gpu_record())) == written


def test_all_committed_results_are_printed():
    text = report.committed()
    assert all(words in text for words in ("P3O, joint", "fastp3o engine", "shared prompts", "TRL GRPO", "vLLM"))
    assert "nan" not in text


def test_a_cell_of_objectives_has_a_figure_for_each_way_and_a_dash_where_there_is_none():
    def one(implementation, objective="DPO", operations=6.0, **more):
        figures = {"objective": objective, "counted_operations": operations, "extra_gb": 0.0336} | more
        return result("objectives", implementation, **figures)

    cpu = [one("fastp3o", ratio=1.25), one("TRL", operations=8.0, ratio=4.5), one("Liger", extra_gb=None)]
    _, dpo = report.objectives(cpu, [one("fastp3o", ratio=1.1)])
    assert dpo == ["DPO", "6 / – / 8 / 6", "34 / – / 34 / –", "1.25 / – / 4.50 / 1.00", "1.10 / – / – / –"]


def gpu_record(record, *levels):
    """What a run on a GPU that ended early has measured."""
    ways = {"generate": {"tokens_per_s": 300.0, "ratio": 1.0, "ms_per_step": 20.0, "computed_per_token": 4.0}}
    ways["generate"] |= {"bytes_read_per_token": 2e6, "ms": 800.0}
    engine = ways["generate"] | {"ratio": 12.0, "ms": 80.0, "floor_ms": 60.0}
    rollout = {"level": "rollouts", "D": 2048, "layers": 16, "V": 128256, "prompt": 350, "response": 40, "mean": None}
    rollout |= {"K": 2, "implementation": "fastp3o"}
    smoke = {"level": "smoke", "implementation": "fastp3o"}
    rollouts = [rollout | {"ways": ways}, rollout | {"ways": {"fastp3o engine": engine}}]
    every = {"hidden": record["benchmarks"], "rollouts": rollouts, "smoke": [smoke]}
    environment = record["environment"] | {"cuda": "13.0"}
    found = [entry for level in levels for entry in every[level]]
    return {"environment": environment, "benchmarks": found, "not_measured": record["not_measured"]}


@pytest.mark.parametrize("levels", [("smoke",), ("smoke", "hidden"), ("smoke", "hidden", "rollouts"), ("rollouts",)])
def test_a_gpu_run_that_ended_early_fills_what_it_can_of_every_page(record, tmp_path, monkeypatch, levels):
    results = tmp_path / "results"
    shutil.copytree(report.RESULTS, results, ignore=shutil.ignore_patterns("frontier", "quickstart"))
    for name in ("README", "PRECISION_PAGE", "FRONT_PAGE"):
        shutil.copy(getattr(report, name), tmp_path / f"{name}.md")
        monkeypatch.setattr(report, name, tmp_path / f"{name}.md")
    monkeypatch.setattr(report, "RESULTS", results)
    (results / "kernels.gpu.json").write_text(json.dumps(gpu_record(record, *levels)))
    report.write()
    assert "no GPU has" not in (tmp_path / "README.md").read_text()
    front_page = (tmp_path / "FRONT_PAGE.md").read_text()
    assert "- [GPU timings](benchmarks/README.md) are of one machine: a GPU." in front_page
    text = report.summary([report.gpu_record()])
    assert bool(re.search(r"three bare products +1.00 × +met", text)) == ("hidden" in levels)
    assert bool(re.search(r"60% of the floor +75% +met", text)) == ("rollouts" in levels)
    assert ("12.00" in text) == ("rollouts" in levels)
