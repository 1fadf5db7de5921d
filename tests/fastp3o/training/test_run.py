"""What Run does between and around the steps of a loop, with a made-up loop."""

import json
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator

from fastp3o.config import StageConfig
from fastp3o.models.loading import load_policy
from fastp3o.precision import precision_of
from fastp3o.training.finite import NotFiniteError
from fastp3o.training.optimizer import Optimizer
from fastp3o.training.run import Run

STEPS = 4


def start(tiny_model, tokenizer, evaluate=None, steps=STEPS, **changes) -> Run:
    config = StageConfig(model=tiny_model, output_dir="run", report_to="none", **changes)
    accelerator = Accelerator(cpu=True)
    optimizer = Optimizer(accelerator, load_policy(tiny_model), precision_of("fp32", "fp32"), config, STEPS)
    return Run(
        accelerator,
        config,
        optimizer,
        tokenizer,
        stage="test",
        step_name="step",
        steps=steps,
        evaluate=evaluate,
        data={},
    )


def take_step(run: Run) -> None:
    sum(parameter.sum() for parameter in run.optimizer.model.parameters()).backward()
    run.optimizer.step(torch.zeros(()))


def finish(run: Run) -> list[int]:
    steps = []
    for step in run:
        with run.saved_if_not_finite(step), run.phase("update"):
            take_step(run)
        run.report(step, {"loss": step / 2}, tokens=10, shown=("loss",))
        steps.append(step)
    return steps


def lines(name: str) -> list[dict]:
    return [json.loads(line) for line in Path("run", name).read_text().splitlines()]


def test_steps_are_reported_evaluated_and_saved_as_configured(workplace, tiny_model, tokenizer):
    calls = []
    run = start(tiny_model, tokenizer, lambda: calls.append(1) or {"score": len(calls)}, eval_every=3, save_every=2)
    assert finish(run) == [1, 2, 3, 4]
    assert [(line["step"], line["score"]) for line in lines("eval.jsonl")] == [(0, 1), (3, 2), (4, 3)]
    metrics = lines("metrics.jsonl")
    assert [(line["step"], line["loss"]) for line in metrics] == [(1, 0.5), (2, 1.0), (3, 1.5), (4, 2.0)]
    assert all(line["tokens_per_second"] == pytest.approx(10 / line["seconds"]) for line in metrics)
    assert {"learning_rate", "peak_memory_gib", "seconds_update"} <= metrics[0].keys()
    saved = {path.name for path in Path("run").iterdir() if path.is_dir()}
    assert saved - {"trackers"} == {"checkpoint-000002", "checkpoint-000004", "model", "state"}


def test_a_resumed_run_goes_on_behind_the_last_saved_step(workplace, tiny_model, tokenizer):
    run = start(tiny_model, tokenizer, save_every=2)
    for step in run:
        take_step(run)
        run.phases.seconds["update"] = 1.0
        run.report(step, {"loss": 0.0}, tokens=1, shown=())
        if step == 3:
            break
    evaluations = []
    resumed = start(tiny_model, tokenizer, lambda: evaluations.append(1) or {"score": 0.0}, resume=True)
    assert finish(resumed) == [3, 4]
    assert [line["step"] for line in lines("metrics.jsonl")] == [1, 2, 3, 4]
    assert len(evaluations) == 1  # at the end: the start was evaluated by the run that began


@pytest.mark.parametrize("optimizer_steps", [0, 1])
def test_a_value_that_is_not_finite_leaves_the_model_before_it(workplace, tiny_model, tokenizer, optimizer_steps):
    run = start(tiny_model, tokenizer)
    with pytest.raises(NotFiniteError, match=r"step 1: a reward is NaN; .* in run/stopped-in-000001"):  # noqa: PT012
        for step in run:
            with run.saved_if_not_finite(step):
                for _ in range(optimizer_steps):
                    take_step(run)
                raise NotFiniteError("a reward is NaN")
    assert Path("run/stopped-in-000001/model/config.json").exists()
    # Between the optimizer steps of an update there is nothing that could be resumed exactly.
    assert Path("run/state").exists() == (optimizer_steps == 0)


def test_a_warning_comes_once(workplace, tiny_model, tokenizer, capsys):
    run = start(tiny_model, tokenizer)
    for number in range(3):
        run.warn_once("something", f"warning {number}")
    printed = capsys.readouterr().out
    assert "warning 0" in printed
    assert "warning 1" not in printed
