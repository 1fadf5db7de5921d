"""Verdicts on made-up results, and pages that are what the committed results give."""

from benchmarks import report
from benchmarks.goals import GOALS, NOT_MEASURED
from benchmarks.predicted_iteration import predicted_iterations


def result(level="hidden", implementation="fastp3o", passes="forward and backward", N=8192, ratio=1.0, ms=10.0, **more):
    shape = {"N": N, "D": 4096, "V": 128256}
    figures = {"ratio_to_bare": ratio, "ms": ms, "extra_gb": None}
    return {"level": level, "implementation": implementation, "passes": passes, **shape, **figures, **more}


def verdict(results, what, goal=""):
    (found,) = [entry for entry in GOALS if entry.what.startswith(what) and goal in entry.goal]
    return found.verdict(results)


def test_the_worst_head_counts_against_peers_of_its_shape_and_nothing_measured_is_said_so():
    assert {goal.verdict([]) for goal in GOALS} == {(NOT_MEASURED, NOT_MEASURED)}
    results = [result(ratio=1.08), result(ratio=1.21, N=32768)]
    assert verdict(results, "hidden-level loss") == ("1.21 ×", "not met")
    assert verdict(results[:1], "hidden-level loss") == ("1.08 ×", "met")
    # Peers are compared at the same shape.
    results = [result(ratio=1.1), result(implementation="TRL", ratio=1.43), result(implementation="TRL", N=32768)]
    assert verdict(results, "the same", "twice") == ("1.30 ×", "met")
    results.append(result(implementation="torch.compile", ratio=0.99))
    assert verdict(results, "the same", "never slower") == ("0.90 ×", "not met")


def rollouts(ratio, K=2, cuda=False, **more):
    ways = {"generate": {"ratio": 1.0}, "fastp3o engine": {"ratio": ratio} | more}
    shape = {"D": 2048, "prompt": 350, "response": 40, "mean": None, "K": K} if cuda else {"K": K}
    return {"level": "rollouts", "implementation": "fastp3o", "cuda": cuda, "ways": ways} | shape


def test_rollouts_are_judged_by_the_device_that_the_goal_names():
    results = [rollouts(1.2), rollouts(0.9, K=4), rollouts(12.0, cuda=True, floor_ms=30.0, ms=40.0)]
    assert verdict(results, "the same, any shape") == ("0.90 ×", "not met")
    assert verdict(results, "rollouts on an H200") == ("75%", "met")
    assert verdict(results, "the same", "≥ 10 ×") == ("12.0 ×", "met")
    assert verdict(results, "rollouts on a CPU") == (NOT_MEASURED, NOT_MEASURED)


def test_what_is_committed_is_what_the_results_give():
    written = report.README.read_text()
    assert report.between_markers(written, "gpu", report.gpu_sentence(report.gpu_record())) == written
    assert "nan" not in report.committed()
    page = (report.FOLDER / "README.md").read_text()
    assert report.markdown(report.modelled()) in page
    assert report.markdown(predicted_iterations()) in page


def test_no_goal_of_a_gpu_is_met_by_times_on_a_cpu():
    sampled = {"level": "rollouts", "implementation": "fastp3o"}
    results = [result(level="training"), sampled]
    assert report.judged({"benchmarks": results, "environment": {"cuda": None}}) == [sampled | {"cuda": False}]
