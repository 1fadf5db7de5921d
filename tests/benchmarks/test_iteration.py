import pytest

from benchmarks.iteration_trainers import PHASES, TRAINERS, Stopwatch, Task, save_model
from benchmarks.test_iteration import Iteration, figures, random_prompts
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


def test_the_median_iteration_and_the_median_ratio():
    phases = dict.fromkeys((*PHASES, "other"), 0.25)
    own = [phases | {"seconds": 1.0 + update, "update": update} for update in (1.0, 2.0, 3.0)]
    measured = {"fastp3o P3O": own, "TRL GRPO": [{"seconds": 10.0}] * 3}
    ours, grpo = (figures(measured, name) for name in measured)
    assert (ours["seconds"], ours["ratio"], ours["update_s"]) == (3.0, 1.0, 2.0)
    assert (grpo["seconds"], grpo["ratio"]) == (10.0, 10 / 3)
