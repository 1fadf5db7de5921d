import pytest

from benchmarks import report


@pytest.fixture
def record():
    figures = {"tokens_per_s": 300.0, "ratio": 1.0, "ms_per_step": 20.0}
    figures |= {"operations_per_step": 340.0}
    ways = {"generate": figures, "fastp3o engine": figures | {"ratio": 3.4}, "TRL GRPO": {"absent": "no module"}}
    result = {"level": "rollouts", "D": 512, "layers": 4, "V": 999, "prompt": 350, "response": 128, "K": 2}
    environment = {"device": "a CPU", "cuda": None, "packages": {}, "date": "2026-01-01"}
    benchmarks = [result | {"mean": mean, "ways": ways} for mean in (None, 40)]
    return {"environment": environment, "benchmarks": benchmarks, "not_measured": []}


def test_the_table_has_every_way_and_reasons_of_those_that_are_absent(record):
    header, _, engine, absent, *_, ragged = report.rollouts(record["benchmarks"])
    assert engine[:4] == ["D 512, 4 layers, V 999", "350 + 128", "2", "fastp3o engine"]
    assert engine[4:] == ["300", "3.40", "20.0", "340"]
    assert absent[3:5] == ["TRL GRPO", "absent: no module"]
    assert ragged[1] == "about 350 + about 40, at most 128"
    assert {len(line) for line in (header, engine, absent, ragged)} == {8}


def test_on_a_gpu_there_are_launches_and_the_share_of_the_floor(record):
    ways = record["benchmarks"][0]["ways"]
    ways["fastp3o engine"] |= {"launches_per_step": 9.4, "gpu_ms_per_step": 1.5, "floor_ms": 60.0, "ms": 80.0}
    header, generate, engine, *_ = report.rollouts(record["benchmarks"])
    assert header[-2:] == ["GPU ms a step", "share of the floor"]
    assert (engine[7], engine[-2:]) == ("9", ["1.50", "75%"])
    assert generate[-2:] == ["", ""]
