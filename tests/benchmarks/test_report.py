import json
import re
import shutil

import pytest

from benchmarks import report
from tests.benchmarks.results import result


def test_what_is_committed_is_what_the_results_give():
    with pytest.raises(ValueError, match="the text has no"):
        report.between_markers("no markers", "x", "new")
    written = report.PRECISION_PAGE.read_text()
    precision = report.precision_section(report.load(report.RESULTS / "policy_precision.json"))
    assert report.between_markers(written, "precision", precision) == written
    written = report.README.read_text()
    assert report.between_markers(written, "gpu", report.gpu_sentence(report.gpu_record())) == written
    text = report.committed()
    assert all(words in text for words in ("P3O, joint", "fastp3o engine", "shared prompts", "TRL GRPO", "vLLM"))
    assert "nan" not in text


def test_no_goal_of_a_gpu_is_met_by_times_on_a_cpu():
    sampled = {"level": "rollouts", "implementation": "fastp3o"}
    results = [result(level="training"), sampled]
    assert report.judged({"benchmarks": results, "environment": {"cuda": None}}) == [sampled | {"cuda": False}]
    everything = [result | {"cuda": True} for result in results]
    assert report.judged({"benchmarks": results, "environment": {"cuda": "13.0"}}) == everything


def test_a_gpu_run_that_ended_early_fills_what_it_can_of_every_page(tmp_path, monkeypatch):
    rates = {"gb_per_s": None, "tflop_per_s": 500.0, "bare_ms": 9.0, "extra_gb": 0.96}
    environment = {"device": "a GPU", "packages": {"torch": "2.13.0"}, "date": "2026-01-01", "cuda": "13.0"}
    missing = [{"name": "test_a", "reason": "absent: no module"}]
    record = {"environment": environment, "benchmarks": [result(**rates)], "not_measured": missing}
    shutil.copytree(report.RESULTS, tmp_path / "results", ignore=shutil.ignore_patterns("frontier", "quickstart"))
    monkeypatch.setattr(report, "RESULTS", tmp_path / "results")
    for name in ("README", "PRECISION_PAGE", "FRONT_PAGE"):
        shutil.copy(getattr(report, name), tmp_path / f"{name}.md")
        monkeypatch.setattr(report, name, tmp_path / f"{name}.md")
    (tmp_path / "results" / "kernels.gpu.json").write_text(json.dumps(record))
    report.write()
    assert "no GPU has" not in (tmp_path / "README.md").read_text()
    assert "are of one machine: a GPU." in (tmp_path / "FRONT_PAGE.md").read_text()
    text = report.summary([report.gpu_record()])
    assert re.search(r"three bare products +1.00 × +met", text)
    assert not re.search(r"60% of the floor +\d", text)
