import pytest

from benchmarks import test_iteration
from benchmarks.iteration_trainers import PHASES, TRAINERS, Stopwatch, Task, save_model
from benchmarks.test_iteration import Iteration, figures, random_prompts
from benchmarks.training_shapes import llama


def seconds(update):
    return {"seconds": 1.0 + update} | dict.fromkeys((*PHASES, "other"), 0.25) | {"update": update}


@pytest.fixture
def record():
    measured = {"fastp3o P3O": [seconds(1.0), seconds(2.0), seconds(3.0)], "TRL GRPO": [{"seconds": 10.0}] * 3}
    trainers = {name: figures(measured, name) | {"peak_gb": 1.5} for name in measured}
    shape = {"model": "tiny", "P": 32, "prompt": 100, "response": 16, "K": 2, "D": 128, "V": 4096, "layers": 4}
    trainers["TRL online DPO"] = {"absent": "No module named 'trl'"}
    result = shape | {"clock": "wall", "level": "iteration", "implementation": "fastp3o", "trainers": trainers}
    return {"environment": {"device": "a CPU"}, "benchmarks": [result], "not_measured": []}


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("name", TRAINERS)
def test_every_trainer_trains(name, passes, tmp_path):
    if "TRL" in name:
        pytest.importorskip("trl")
    config = llama(32, 48, 2, 4, 2, 61)
    task = Task(tmp_path / "model", random_prompts(Iteration("tiny", 4, 9, 5, 2), 61), 5, 2, passes)
    save_model(config, task.model)
    measured = TRAINERS[name](task, 2, tmp_path, Stopwatch())
    assert len(measured) == 2
    for iteration in measured:
        assert list(iteration) == ["seconds"] if "TRL" in name else ["seconds", *PHASES, "other"]
        assert min(iteration.values()) > 0


def test_the_median_iteration_and_the_median_ratio(record):
    ours, grpo, _ = record["benchmarks"][0]["trainers"].values()
    assert (ours["seconds"], ours["ratio"], ours["update_s"]) == (3.0, 1.0, 2.0)
    assert (grpo["seconds"], grpo["ratio"]) == (10.0, 10 / 3)


def test_memory_is_counted_until_the_block_is_left():
    with test_iteration.peak_memory() as peak:
        assert peak == []
    assert len(peak) == 1
