"""Run's work between and around the steps of a made-up loop."""

import json
import multiprocessing
import os
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from safetensors.torch import load_file

from fastp3o.config import StageConfig
from fastp3o.context import Context
from fastp3o.models.loading import load_policy
from fastp3o.optimizer import Optimizer
from fastp3o.precision import choose_precision
from fastp3o.processes import NotFiniteError
from fastp3o.run import signals as stopping
from fastp3o.run.manifest import ResumeError
from fastp3o.run.run import Run, Steps
from fastp3o.run.signals import Stops
from tests.fastp3o.runs import assert_equal, weights

STEPS = 4


@pytest.fixture(autouse=True)
def no_signal_is_ignored():
    """Runs ignore a signal that they inherit as ignored, as from nohup or a shell's background."""
    as_they_begin = {signal.SIGINT: signal.default_int_handler, signal.SIGHUP: signal.SIG_DFL}
    before = {number: signal.signal(number, handler) for number, handler in as_they_begin.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(autouse=True)
def every_metric_stands_in_the_table() -> None:
    """These runs report made-up metrics."""


def start(tiny_model, tokenizer, evaluate=None, steps=STEPS, **changes) -> Run:
    config = StageConfig(**({"model": tiny_model, "output_dir": "run", "report_to": "none"} | changes))
    trackers = None if config.report_to == "none" else config.report_to
    accelerator = Accelerator(cpu=True, log_with=trackers, project_dir=config.output_dir)
    precision = choose_precision("fp32", "fp32")
    optimizer = Optimizer(accelerator, load_policy(tiny_model), precision, config, STEPS)
    context = Context(accelerator, precision, tokenizer, None)
    return Run(context, config, optimizer, Steps("test", "step", steps), evaluate=evaluate, data={})


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


def test_lost_metrics_are_said(workplace, tiny_model, tokenizer, capsys):
    finish(start(tiny_model, tokenizer, save_every=2, steps=2))
    Path("run/metrics.jsonl").unlink()
    assert finish(start(tiny_model, tokenizer, save_every=2, resume=True)) == [3, 4]
    assert "run/metrics.jsonl is gone, and with it the metrics up to step 2" in capsys.readouterr().out


@pytest.mark.parametrize("optimizer_steps", [0, 1])
def test_a_value_that_is_not_finite_leaves_the_model_before_it(workplace, tiny_model, tokenizer, optimizer_steps):
    run = start(tiny_model, tokenizer)
    with pytest.raises(NotFiniteError, match=r"step 2: a reward is NaN; .* in run/stopped-in-000002"):  # noqa: PT012
        for step in run:
            if step == 1:
                take_step(run)
                continue
            with run.saved_if_not_finite(step):
                for _ in range(optimizer_steps):
                    take_step(run)
                raise NotFiniteError("a reward is NaN")
    assert Path("run/stopped-in-000002/model/config.json").exists()
    # Between the optimizer steps of an update there is nothing that could be resumed exactly.
    assert Path("run/state").exists() == (optimizer_steps == 0)


def test_before_the_first_step_no_model_is_written(workplace, tiny_model, tokenizer):
    run = start(tiny_model, tokenizer)
    with pytest.raises(NotFiniteError, match="step 1: a reward is NaN; nothing was trained before that"):  # noqa: PT012
        for step in run:
            with run.saved_if_not_finite(step):
                raise NotFiniteError("a reward is NaN")
    assert sorted(path.name for path in Path("run").iterdir()) == ["config.yaml", "fastp3o.lock"]
    finish(start(tiny_model, tokenizer))  # it can be begun again, without a flag


@pytest.mark.parametrize(("kept", "left"), [(0, [1, 2, 3, 4]), (1, [4]), (2, [3, 4])])
def test_so_many_checkpoints_are_kept(workplace, tiny_model, tokenizer, kept, left):
    finish(start(tiny_model, tokenizer, save_every=1, keep_checkpoints=kept))
    assert sorted(path.name for path in Path("run").glob("checkpoint*")) == [f"checkpoint-{n:06}" for n in left]


def test_a_runs_name_reaches_the_trackers_that_have_names(workplace, tiny_model, tokenizer, monkeypatch):
    asked = {}
    monkeypatch.setattr(Accelerator, "init_trackers", lambda self, project, **options: asked.update(options))
    start(tiny_model, tokenizer, run_name="first")
    assert asked["init_kwargs"] == {"wandb": {"name": "first"}, "trackio": {"name": "first"}}


def whole(tiny_model, tokenizer, **changes) -> dict[str, torch.Tensor]:
    """The weights of an unbroken run."""
    folder = "whole"
    finish(start(tiny_model, tokenizer, lambda: {"score": 1.0}, eval_every=2, output_dir=folder, **changes))
    return weights(folder)


def kill_in(step_of_signal: int, number: signal.Signals, run: Run, *, before_optimizer: bool) -> None:
    for step in run:
        with run.phase("rollout"):
            if step == step_of_signal and before_optimizer:
                os.kill(os.getpid(), number)
        with run.phase("update"):
            take_step(run)
            if step == step_of_signal and not before_optimizer:
                os.kill(os.getpid(), number)
        run.report(step, {"loss": step / 2}, tokens=10, shown=("loss",))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP])
@pytest.mark.parametrize("before_optimizer", [False, True])
def test_a_signal_saves_what_can_be_resumed_exactly(workplace, tiny_model, tokenizer, capfd, number, before_optimizer):
    expected = whole(tiny_model, tokenizer)
    run = start(tiny_model, tokenizer, lambda: {"score": 1.0}, eval_every=2)
    handler = signal.getsignal(number)
    with pytest.raises(SystemExit) as stopped:
        kill_in(2, number, run, before_optimizer=before_optimizer)
    assert stopped.value.code == 128 + number
    assert signal.getsignal(number) == handler
    after = 1 if before_optimizer else 2
    out, err = capfd.readouterr()
    assert f"{number.name}: stopped after step {after}; --resume goes on from there\n" in out
    assert f"{number.name}: stopping as soon as the run can be resumed from there; again in 3 s to stop at once" in err
    assert os.listdir("run/state") == [f"step-{after:06}"]
    assert not Path("run/model").exists()
    finish(start(tiny_model, tokenizer, lambda: {"score": 1.0}, eval_every=2, resume=True))
    assert f"resuming after step {after}, from run/state/step-{after:06}" in capfd.readouterr().out
    assert_equal(weights("run"), expected)
    # The evaluation that was due after the step is made when the run is resumed.
    assert [line["step"] for line in lines("eval.jsonl")] == [0, 2, 4]
    assert [line["step"] for line in lines("metrics.jsonl")] == [1, 2, 3, 4]


def test_a_stop_in_an_evaluation_comes_behind_it(workplace, tiny_model, tokenizer):
    def evaluate():
        os.kill(os.getpid(), signal.SIGTERM)
        return {"score": 1.0}

    with pytest.raises(SystemExit):
        finish(start(tiny_model, tokenizer, evaluate))
    assert [line["step"] for line in lines("eval.jsonl")] == [0]
    assert os.listdir("run/state") == ["step-000000"]
    resumed = start(tiny_model, tokenizer, lambda: {"score": 1.0}, resume=True)
    assert finish(resumed) == [1, 2, 3, 4]
    assert [line["step"] for line in lines("eval.jsonl")] == [0, 4]


def test_an_evaluation_that_was_not_due_is_made_where_the_resumed_run_ends(workplace, tiny_model, tokenizer):
    run = start(tiny_model, tokenizer, lambda: {"score": 1.0}, steps=6, save_every=2)
    for step in run:
        take_step(run)
        run.phases.seconds["update"] = 1.0
        run.report(step, {"loss": 0.0}, tokens=1, shown=())
        if step == 5:
            break
    assert finish(start(tiny_model, tokenizer, lambda: {"score": 2.0}, steps=4, resume=True)) == []
    assert [(line["step"], line["score"]) for line in lines("eval.jsonl")] == [(0, 1), (4, 2)]


def test_a_checkpoint_that_a_stop_came_before_is_made_up_for(workplace, tiny_model, tokenizer):
    finish(start(tiny_model, tokenizer, output_dir="whole", save_every=2))
    run = start(tiny_model, tokenizer, save_every=2)
    with pytest.raises(SystemExit):
        kill_in(2, signal.SIGTERM, run, before_optimizer=False)
    assert os.listdir("run/state") == ["step-000002"]
    finish(start(tiny_model, tokenizer, resume=True, save_every=2))
    for name in ("checkpoint-000002", "checkpoint-000004"):
        made, expected = (load_file(Path(folder, name, "model.safetensors")) for folder in ("run", "whole"))
        assert_equal(made, expected)


def test_states_are_saved_by_time(workplace, tiny_model, tokenizer):
    finish(start(tiny_model, tokenizer, save_minutes=1e-9))
    assert sorted(os.listdir("run/state")) == ["step-000003", "step-000004"]
    finish(start(tiny_model, tokenizer, output_dir="rarely"))
    assert os.listdir("rarely/state") == ["step-000004"]


def test_a_finished_run_only_writes_its_model_again(workplace, tiny_model, tokenizer):
    finish(start(tiny_model, tokenizer))
    before = weights("run")
    shutil.rmtree("run/model")
    assert finish(start(tiny_model, tokenizer, resume=True)) == []
    assert_equal(weights("run"), before)


def test_a_run_cannot_end_before_its_state(workplace, tiny_model, tokenizer):
    finish(start(tiny_model, tokenizer))
    before = {path: path.read_bytes() for path in Path("run").rglob("*") if path.is_file()}
    with pytest.raises(ResumeError, match=r"run/state/step-000004 is after step 4, and this run would end at 2"):
        start(tiny_model, tokenizer, steps=2, resume=True)
    with pytest.raises(ResumeError, match="--seed"):
        start(tiny_model, tokenizer, resume=True, seed=5)
    assert {path: path.read_bytes() for path in Path("run").rglob("*") if path.is_file()} == before
    assert finish(start(tiny_model, tokenizer, steps=6, resume=True)) == [5, 6]


def test_another_starting_model_under_the_same_name_is_noticed(workplace, tiny_model, tokenizer):
    shutil.copytree(tiny_model, "start")
    finish(start("start", tokenizer))
    model = load_policy("start")
    with torch.no_grad():
        model.head().weight.mul_(1.001)
    model.model.save_pretrained("start")
    with pytest.raises(ResumeError, match=r"the content another than when the run began: --model \(start\)"):
        start("start", tokenizer, resume=True)


def test_a_changed_learning_rate_takes_effect_and_is_said(workplace, tiny_model, tokenizer, capsys):
    finish(start(tiny_model, tokenizer))
    capsys.readouterr()
    finish(start(tiny_model, tokenizer, steps=5, resume=True, learning_rate=0.25))
    assert capsys.readouterr().out.splitlines() == [
        "resuming with another learning_rate: 1e-05 before, 0.25 now",
        "resuming after step 4, from run/state/step-000004",
        "test 5/5: loss 2.5",
        "progress: run/progress.png",
        "model: run/model",
    ]
    assert [line["learning_rate"] for line in lines("metrics.jsonl")] == [1e-5] * 4 + [0.25]


def test_an_evaluation_that_is_not_finite_stops_the_run_after_saving(workplace, tiny_model, tokenizer):
    scores = iter([1.0, float("nan"), 2.0, 3.0])
    run = start(tiny_model, tokenizer, lambda: {"score": next(scores)}, eval_every=2)
    with pytest.raises(
        NotFiniteError, match=r"step 2: score of the evaluation is NaN or infinite; the model .*step-000002"
    ):
        finish(run)
    assert [line["step"] for line in lines("eval.jsonl")] == [0]
    assert finish(start(tiny_model, tokenizer, lambda: {"score": next(scores)}, eval_every=2, resume=True)) == [3, 4]
    assert [(line["step"], line["score"]) for line in lines("eval.jsonl")] == [(0, 1), (2, 2), (4, 3)]


@pytest.mark.parametrize("changes", [{"learning_rate": 3e38}, {"adam_eps": 1e-300, "adam_beta2": 0.0}])
def test_divergence_leaves_the_good_state_and_says_which(workplace, tiny_model, tokenizer, changes):
    finish(start(tiny_model, tokenizer, steps=2, save_every=1))
    good = weights("run")
    run = start(tiny_model, tokenizer, save_every=1, resume=True, **changes)
    message = r"is NaN or infinite.*last good state is run/state/step-00000\d: --resume"
    with pytest.raises(NotFiniteError, match=message):  # noqa: PT012
        for step in run:
            with run.saved_if_not_finite(step), run.phase("update"):
                (0 * sum(parameter.sum() for parameter in run.optimizer.model.parameters())).backward()
                run.optimizer.step(torch.zeros(()))
    assert_equal(weights("run"), good)
    assert finish(start(tiny_model, tokenizer, resume=True))[-1] == 4


def test_tensorboard_hides_the_steps_that_are_done_again(workplace, tiny_model, tokenizer):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    def steps(run: Run) -> None:
        for step in run:
            with run.phase("update"):
                take_step(run)
            run.report(step, {"loss": 0.0}, tokens=1, shown=())
            if step == 3:
                break

    steps(start(tiny_model, tokenizer, save_every=2, report_to="tensorboard"))
    AcceleratorState._reset_state(reset_partial_state=True)
    time.sleep(1)  # TensorBoard reads files in the order of their names, which have seconds
    finish(start(tiny_model, tokenizer, save_every=2, resume=True, report_to="tensorboard"))
    events = EventAccumulator("run/trackers").Reload()
    assert [scalar.step for scalar in events.Scalars("train/loss")] == [1, 2, 3, 4]


def take_signals() -> None:
    stopping.ONE_REQUEST = 0.5
    with Stops(Accelerator(cpu=True)) as stops:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)  # as torchrun passes on what its workers have received already
        print(stops.agreed(False), flush=True)
        time.sleep(0.6)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(60)


def test_a_second_signal_ends_at_once(capfd):
    child = multiprocessing.get_context("fork").Process(target=take_signals)
    child.start()
    child.join(50)
    assert child.exitcode == -signal.SIGINT
    output = capfd.readouterr()
    assert output.out == "(15, False)\n"
    assert "Traceback" not in output.err
