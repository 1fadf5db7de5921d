from benchmarks.goals import GOALS, NOT_MEASURED
from tests.benchmarks.results import result


def verdict(results, what, goal=""):
    (found,) = [entry for entry in GOALS if entry.what.startswith(what) and goal in entry.goal]
    return found.verdict(results)


def test_nothing_measured_is_said_so():
    assert {goal.verdict([]) for goal in GOALS} == {(NOT_MEASURED, NOT_MEASURED)}


def test_the_worst_head_counts():
    results = [result(ratio=1.08), result(ratio=1.21, N=32768)]
    assert verdict(results, "hidden-level loss") == ("1.21 ×", "not met")
    assert verdict(results[:1], "hidden-level loss") == ("1.08 ×", "met")


def test_peers_are_compared_at_the_same_shape():
    results = [result(ratio=1.1), result(implementation="TRL", ratio=1.43), result(implementation="TRL", N=32768)]
    assert verdict(results, "the same", "twice") == ("1.30 ×", "met")
    results.append(result(implementation="torch.compile", ratio=0.99))
    assert verdict(results, "the same", "twice") == ("1.30 ×", "met")
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
