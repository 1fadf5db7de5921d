from fastp3o.objectives.preferences import OnlineDPOConfig
from fastp3o.training.loop import train
from tests.fastp3o.runs import assert_equal, config, copy_at_save_before, metrics, weights


def run(model: str, folder: str, **changes) -> None:
    train(config(model, folder, OnlineDPOConfig, **changes))


def test_a_run_raises_the_reward(workplace, tiny_model):
    run(tiny_model, "run", updates=20, kl_coef=0.1)
    steps = metrics("run")
    assert steps[0]["margin"] != 0
    assert sum(s["reward"] for s in steps[-5:]) > sum(s["reward"] for s in steps[:5])


def test_a_resumed_run_is_the_uninterrupted_one(workplace, tiny_model):
    run(tiny_model, "whole", save_every=2)
    copy_at_save_before("whole", "resumed")
    run(tiny_model, "resumed", resume=True)
    assert metrics("whole") == metrics("resumed")
    assert_equal(weights("whole"), weights("resumed"))
