import pytest

from benchmarks.iteration_trainers import PHASES, TRAINERS, Stopwatch, Task, save_model
from benchmarks.test_iteration import Iteration, random_prompts
from benchmarks.training_shapes import llama


@pytest.mark.parametrize("name", TRAINERS)
def test_every_trainer_trains(name, tmp_path):
    if "TRL" in name:
        pytest.importorskip("trl")
    config = llama(32, 48, 2, 4, 2, 61)
    task = Task(tmp_path / "model", random_prompts(Iteration("tiny", 4, 9, 5, 2), 61), 5, 2, 2)
    save_model(config, task.model)
    measured = TRAINERS[name](task, 2, tmp_path, Stopwatch())
    assert len(measured) == 2
    for iteration in measured:
        assert list(iteration) == ["seconds"] if "TRL" in name else ["seconds", *PHASES, "other"]
        assert min(iteration.values()) > 0
