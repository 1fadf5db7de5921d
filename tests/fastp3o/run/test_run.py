"""Run's work between and around the steps of a made-up loop."""

import json
import multiprocessing
import os
import shutil
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file
from tqdm import tqdm

from fastp3o.config import StageConfig
from fastp3o.errors import UserError
from fastp3o.models.loading import load_policy
from fastp3o.objectives.config.p3o import P3OConfig
from fastp3o.optimizer.optimizer import Optimizer
from fastp3o.run import signals as stopping
from fastp3o.run import tensors as store
from fastp3o.run.best import Best
from fastp3o.run.manifest import ResumeError, require_same_run
from fastp3o.run.run import Run, Steps
from fastp3o.run.signals import Stops
from fastp3o.runtime.context import Context
from fastp3o.runtime.finiteness import NotFiniteError
from fastp3o.runtime.precision import choose_precision
from tests.fastp3o.runs import assert_equal, weights

STEPS = 4
FORK = multiprocessing.get_context("fork")


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
    config = StageConfig(
        **({"model": tiny_model, "output_dir": "run", "report_to": "none"} | changes)
    )
    trackers = None if config.report_to == "none" else config.report_to
    accelerator = Accelerator(cpu=True, log_with=trackers, project_dir=config.output_dir)
    precision = choose_precision("fp32", "fp32")
    optimizer = Optimizer(accelerator, load_policy(tiny_model), precision, config, STEPS)
    context = Context(accelerator, precision, tokenizer, None)
    return Run(context, config, optimizer, Steps("test", "step", steps), evaluate=evaluate, data={})


def take_step(run: Run) -> None:
    sum(parameter.sum() for parameter in run.optimizer.model.parameters()).backward()
    run.optimizer.step(torch.zeros(()))


def finish(
    run: Run, breaks_off_after: int = 0, signalled: tuple[int, str, int] = (0, "", 0)
) -> list[int]:
    """signalled: a step, the phase in whose work a signal comes, and its number."""
    steps = []
    for step in run:
        for phase in ("rollout", "update"):
            with run.saved_if_not_finite(step), run.phase(phase):
                if phase == "update":
                    take_step(run)
                if (step, phase) == signalled[:2]:
                    os.kill(os.getpid(), signalled[2])
        run.report(step, {"loss": step / 2}, tokens=10, shown=("loss",))
        steps.append(step)
        if step == breaks_off_after:
            break
    return steps


def lines(name: str) -> list[dict]:
    return [json.loads(line) for line in Path("run", name).read_text().splitlines()]


def test_steps_are_reported_evaluated_and_saved_as_configured(workplace, tiny_model, tokenizer):
    calls = []
    run = start(
        tiny_model,
        tokenizer,
        lambda: calls.append(1) or {"score": len(calls)},
        eval_every=3,
        save_every=2,
    )
    assert finish(run) == [1, 2, 3, 4]
    assert [(line["step"], line["score"]) for line in lines("eval.jsonl")] == [
        (0, 1),
        (3, 2),
        (4, 3),
    ]
    metrics = lines("metrics.jsonl")
    assert [(line["step"], line["loss"]) for line in metrics] == [
        (1, 0.5),
        (2, 1.0),
        (3, 1.5),
        (4, 2.0),
    ]
    assert all(line["tokens_per_second"] == pytest.approx(10 / line["seconds"]) for line in metrics)
    assert {"learning_rate", "peak_memory_gib", "seconds_update"} <= metrics[0].keys()
    saved = {path.name for path in Path("run").iterdir() if path.is_dir()}
    assert saved - {"trackers"} == {"checkpoint-000002", "checkpoint-000004", "model", "state"}


@pytest.mark.parametrize("optimizer_steps", [0, 1])
def test_a_value_that_is_not_finite_leaves_the_model_before_it(
    workplace, tiny_model, tokenizer, optimizer_steps
):
    run = start(tiny_model, tokenizer)
    says = "step 1: a reward is NaN; nothing was trained before that"
    with pytest.raises(NotFiniteError, match=says), run.saved_if_not_finite(next(iter(run))):
        raise NotFiniteError("a reward is NaN")
    assert sorted(path.name for path in Path("run").iterdir()) == ["config.yaml", "fastp3o.lock"]

    run = start(tiny_model, tokenizer)  # it can be begun again, without a flag
    steps = iter(run)
    next(steps)
    take_step(run)
    says = r"step 2: a reward is NaN; .* in run/stopped-in-000002"
    with pytest.raises(NotFiniteError, match=says), run.saved_if_not_finite(next(steps)):  # noqa: PT012
        for _ in range(optimizer_steps):
            take_step(run)
        raise NotFiniteError("a reward is NaN")
    assert Path("run/stopped-in-000002/model/config.json").exists()
    # Between the optimizer steps of an update there is nothing that could be resumed exactly.
    assert Path("run/state").exists() == (optimizer_steps == 0)


@pytest.mark.parametrize("fails", [False, True])
def test_a_state_is_placed_after_the_next_step_or_before_its_error_names_it(
    workplace, tiny_model, tokenizer, fails
):
    steps = iter(run := start(tiny_model, tokenizer, save_every=2))
    for _ in range(2):
        next(steps)
        take_step(run)
    assert next(steps) == 3
    assert [name[:23] for name in os.listdir("run/state")] == ["step-000002.unfinished-"]
    take_step(run)
    if fails:
        says = "step 3: a loss is NaN; .* The last good state is run/state/step-000002: --resume continues"
        with pytest.raises(NotFiniteError, match=says), run.saved_if_not_finite(3):
            raise NotFiniteError("a loss is NaN")
    else:
        next(steps)
    assert os.listdir("run/state") == ["step-000002"]


def test_a_state_is_placed_at_the_first_phase_at_which_it_is_written(
    workplace, tiny_model, tokenizer, monkeypatch
):
    """Not before: no phase waits for the disk."""
    may_write, written = threading.Event(), store.write_file

    def write(*given: object) -> str:
        assert may_write.wait(60)
        return written(*given)

    monkeypatch.setattr(store, "write_file", write)
    steps = iter(run := start(tiny_model, tokenizer, save_every=2))
    for _ in range(2):
        next(steps)
        take_step(run)
    assert next(steps) == 3
    with run.phase("rollout"):
        assert [name[:23] for name in os.listdir("run/state")] == ["step-000002.unfinished-"]
    may_write.set()
    run.states.written.result()
    with run.phase("update"):
        assert os.listdir("run/state") == ["step-000002"]
        take_step(run)
    next(steps)


@pytest.mark.parametrize(("kept", "left"), [(0, [1, 2, 3, 4]), (2, [3, 4])])
def test_so_many_checkpoints_are_kept_and_states_are_saved_by_time(
    workplace, tiny_model, tokenizer, kept, left
):
    finish(start(tiny_model, tokenizer, save_every=1, keep_checkpoints=kept, save_minutes=1e-9))
    assert sorted(path.name for path in Path("run").glob("checkpoint*")) == [
        f"checkpoint-{n:06}" for n in left
    ]
    assert sorted(os.listdir("run/state")) == ["step-000003", "step-000004"]
    finish(start(tiny_model, tokenizer, output_dir="rarely"))
    assert os.listdir("rarely/state") == ["step-000004"]


@pytest.mark.parametrize(
    ("phase", "number"),
    [
        ("rollout", signal.SIGTERM),
        ("update", signal.SIGINT),
        ("rollout", signal.SIGHUP),
        ("update", signal.SIGUSR1),
    ],
)
def test_a_signal_saves_what_can_be_resumed_exactly(
    workplace, tiny_model, tokenizer, capfd, phase, number
):
    def begin(folder: str, **changes) -> Run:
        settings = {"output_dir": folder, "eval_every": 2, "save_every": 2} | changes
        return start(tiny_model, tokenizer, lambda: {"score": 1.0}, **settings)

    finish(begin("whole"))
    run, handler = begin("run"), signal.getsignal(number)
    with pytest.raises(SystemExit) as stopped:
        finish(run, signalled=(2, phase, number))
    assert stopped.value.code == 128 + number
    assert signal.getsignal(number) == handler
    after = 1 if phase == "rollout" else 2
    out, err = capfd.readouterr()
    assert f"{number.name}: stopped after step {after}; --resume continues from there\n" in out
    assert (
        f"{number.name}: stopping as soon as the run can be resumed from there; again in 3 s to stop at once"
        in err
    )
    assert os.listdir("run/state") == [f"step-{after:06}"]
    assert not Path("run/model").exists()
    finish(begin("run", resume=True))
    assert f"resuming after step {after}, from run/state/step-{after:06}" in capfd.readouterr().out
    # What was due after the step, evaluation and checkpoint, is made when the run is resumed.
    assert [line["step"] for line in lines("eval.jsonl")] == [0, 2, 4]
    assert [line["step"] for line in lines("metrics.jsonl")] == [1, 2, 3, 4]
    for name in ("model", "checkpoint-000002", "checkpoint-000004"):
        assert_equal(
            *(load_file(Path(folder, name, "model.safetensors")) for folder in ("run", "whole"))
        )


def test_an_evaluation_that_was_not_due_is_made_where_the_resumed_run_ends(
    workplace, tiny_model, tokenizer
):
    finish(
        start(tiny_model, tokenizer, lambda: {"score": 1.0}, steps=6, save_every=2),
        breaks_off_after=5,
    )
    assert finish(start(tiny_model, tokenizer, lambda: {"score": 2.0}, steps=4, resume=True)) == []
    assert [(line["step"], line["score"]) for line in lines("eval.jsonl")] == [(0, 1), (4, 2)]


def test_another_run_is_refused_and_what_may_change_takes_effect(
    workplace, tiny_model, tokenizer, monkeypatch, capsys
):
    shutil.copytree(tiny_model, "start")
    finish(start("start", tokenizer))
    before = {path: path.read_bytes() for path in Path("run").rglob("*") if path.is_file()}
    with pytest.raises(
        ResumeError, match=r"run/state/step-000004 is after step 4, and this run would end at 2"
    ):
        start("start", tokenizer, steps=2, resume=True)
    with pytest.raises(ResumeError, match="--seed"):
        start("start", tokenizer, resume=True, seed=5)
    policy = load_policy("start")
    with torch.no_grad():
        policy.head().weight.mul_(1.001)
    shutil.move("start", "as it was")
    policy.model.save_pretrained("start")
    with pytest.raises(
        ResumeError, match=r"the content has changed since the run began: --model \(start\)"
    ):
        start("start", tokenizer, resume=True)
    shutil.rmtree("start")
    shutil.move("as it was", "start")
    assert {path: path.read_bytes() for path in Path("run").rglob("*") if path.is_file()} == before

    capsys.readouterr()
    options = {}
    monkeypatch.setattr(
        Accelerator, "init_trackers", lambda self, project, **given: options.update(given)
    )
    changes = {"steps": 6, "learning_rate": 0.25, "run_name": "first"}
    assert finish(start("start", tokenizer, resume=True, **changes)) == [5, 6]
    assert (
        "resuming with another learning_rate: 1e-05 before, 0.25 now\n" in capsys.readouterr().out
    )
    assert [line["learning_rate"] for line in lines("metrics.jsonl")] == [1e-5] * 4 + [0.25] * 2
    # TensorBoard hides the steps after the state, and trackers that have names get the run's.
    named = {"name": "first"}
    assert options["init_kwargs"] == {
        "tensorboard": {"purge_step": 5},
        "wandb": named,
        "trackio": named,
    }


def test_an_evaluation_that_is_not_finite_stops_the_run_after_saving(
    workplace, tiny_model, tokenizer
):
    scores = iter([1.0, float("nan"), 2.0, 3.0])
    run = start(tiny_model, tokenizer, lambda: {"score": next(scores)}, eval_every=2)
    says = r"step 2: score of the evaluation is NaN or infinite; the model .*step-000002"
    with pytest.raises(NotFiniteError, match=says):
        finish(run)
    assert [line["step"] for line in lines("eval.jsonl")] == [0]
    assert finish(
        start(tiny_model, tokenizer, lambda: {"score": next(scores)}, eval_every=2, resume=True)
    ) == [3, 4]
    assert [(line["step"], line["score"]) for line in lines("eval.jsonl")] == [
        (0, 1),
        (2, 2),
        (4, 3),
    ]


@pytest.mark.parametrize(
    "changes", [{"learning_rate": 3e38}, {"adam_eps": 1e-300, "adam_beta2": 0.0}]
)
def test_divergence_leaves_the_good_state_and_says_which(workplace, tiny_model, tokenizer, changes):
    finish(start(tiny_model, tokenizer, steps=2, save_every=1))
    good = weights("run")
    run = start(tiny_model, tokenizer, save_every=1, resume=True, **changes)
    message = r"is NaN or infinite.*last good state is run/state/step-00000\d: --resume"
    with pytest.raises(NotFiniteError, match=message):  # noqa: PT012
        for step in run:
            with run.saved_if_not_finite(step), run.phase("update"):
                (
                    0 * sum(parameter.sum() for parameter in run.optimizer.model.parameters())
                ).backward()
                run.optimizer.step(torch.zeros(()))
    assert_equal(weights("run"), good)
    assert finish(start(tiny_model, tokenizer, resume=True))[-1] == 4


SCORES = [0.0, 2.0, 5.0, 5.0, 3.0, 4.0, 9.0]


def start_with_scores(tiny_model, tokenizer, steps=6, **changes) -> Run:
    """Evaluations find SCORES, one after the other."""

    def evaluate() -> dict[str, float]:
        return {"score": SCORES[len(lines("eval.jsonl")) if Path("run/eval.jsonl").exists() else 0]}

    settings = {"eval_every": 1, "save_every": 1, "keep_best": "score"} | changes
    return start(tiny_model, tokenizer, evaluate, steps, **settings)


def assert_best_is(step: int) -> None:
    best = json.loads(Path("run/best/evaluation.json").read_text())
    assert best == {"step": step, "score": SCORES[step]}
    kept, saved = (
        load_file(f"run/{name}/model.safetensors") for name in ("best", f"checkpoint-{step:06}")
    )
    assert_equal(kept, saved)


def test_early_stopping_ends_the_run_and_keeps_the_best(workplace, tiny_model, tokenizer, capsys):
    # 5 comes twice: an equal one is not better.
    assert finish(start_with_scores(tiny_model, tokenizer, early_stopping=3)) == [1, 2, 3, 4, 5]
    assert_best_is(2)
    assert (
        "--early_stopping: no evaluation since was better than score 5 after step 2"
        in capsys.readouterr().out
    )
    assert Path("run/model").exists()
    assert finish(start_with_scores(tiny_model, tokenizer, early_stopping=3, resume=True)) == []
    assert finish(start_with_scores(tiny_model, tokenizer, resume=True)) == [6]
    assert_best_is(6)
    assert "best score 9 after step 6: run/best" in capsys.readouterr().out


def test_a_resumed_run_keeps_the_best_of_an_unbroken_one(workplace, tiny_model, tokenizer):
    finish(start_with_scores(tiny_model, tokenizer), breaks_off_after=4)
    assert finish(start_with_scores(tiny_model, tokenizer, early_stopping=3, resume=True)) == [4, 5]
    assert_best_is(2)


def test_the_lowest_is_best_where_it_is_asked_for_and_a_metric_must_be_there(
    workplace, tiny_model, tokenizer
):
    finish(start_with_scores(tiny_model, tokenizer, steps=2, best_is="lowest"))
    assert json.loads(Path("run/best/evaluation.json").read_text())["step"] == 0
    with pytest.raises(UserError, match="--keep_best accuracy: evaluations have score"):
        finish(start_with_scores(tiny_model, tokenizer, keep_best="accuracy", overwrite=True))


@pytest.mark.parametrize("lowest", [True, False])
def test_any_number_is_better_than_none_and_none_is_never_better(lowest, tmp_path):
    best = Best("reward/a", lowest=lowest, folder=tmp_path)
    assert best.improves(1, {"reward/a": float("nan")})
    assert not best.improves(2, {"reward/a": float("nan")})
    assert best.since == 1
    assert best.improves(3, {"reward/a": 0.0})
    assert (best.best["step"], best.since) == (3, 0)
    assert not best.improves(4, {"reward/a": float("nan")})


def test_a_worker_that_is_stopped_ends(capfd):
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # whatever an earlier test has left
    with Stops(Accelerator(cpu=True)) as stops:
        worker = FORK.Process(target=time.sleep, args=(20,))
        worker.start()
        worker.join(0.2)
        worker.terminate()
        worker.join(5)
        code = worker.exitcode
        worker.kill()
        assert code == -signal.SIGTERM
        assert stops.received == 0
        os.kill(os.getpid(), signal.SIGTERM)
        assert stops.received == signal.SIGTERM
    assert capfd.readouterr().err.count("stopping as soon as") == 1


def take_signals() -> None:
    stopping.ONE_REQUEST = 0.5
    with Stops(Accelerator(cpu=True)) as stops:
        os.kill(os.getpid(), signal.SIGTERM)
        # as torchrun passes on what its workers have received already
        os.kill(os.getpid(), signal.SIGTERM)
        print(stops.agreed(False, False), flush=True)
        time.sleep(0.6)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(60)


def test_a_second_signal_ends_at_once(capfd):
    child = FORK.Process(target=take_signals)
    child.start()
    child.join(50)
    assert child.exitcode == -signal.SIGINT
    output = capfd.readouterr()
    assert output.out == "(15, False, False)\n"
    assert "Traceback" not in output.err


def test_a_worker_that_is_killed_while_it_prints_leaves_the_run_its_lock():
    worker = os.fork()
    if not worker:
        tqdm.get_lock().acquire()
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(worker, 0)
    printing = threading.Thread(target=tqdm.write, args=["the next line"], daemon=True)
    printing.start()
    printing.join(5)
    assert not printing.is_alive()


def test_a_resumed_run_says_which_changes_nobody_asked_for():
    given = {"model": "m", "output_dir": "o", "prompts": "p", "reward": "r"}
    before = P3OConfig(**given, learning_rate=1e-3, overwrite=True, updates=3)
    manifest = SimpleNamespace(config=before.plain(), fingerprints={}, processes=1)
    lines = require_same_run(manifest, P3OConfig(**given, resume=True, updates=4), {}, 1)
    assert lines == [
        "resuming with another kl_per_update: None before, 0.3 now by default",
        "resuming with another learning_rate: 0.001 before, 1e-06 now by default",
        "resuming with another updates: 3 before, 4 now",
    ]


@pytest.mark.parametrize("names", [["model"], ["adapter"], ["model", "adapter"]])
def test_the_last_lines_name_all_that_is_saved(tmp_path, monkeypatch, names):
    said = []
    monkeypatch.chdir(tmp_path)
    for name in names:
        Path(name).mkdir()
    accelerator = SimpleNamespace(print=said.append)
    run = SimpleNamespace(
        best=None, reporter=SimpleNamespace(close=list), accelerator=accelerator, folder=tmp_path
    )
    Run.finish(run, None)
    assert said == (
        ["model: adapter"] if names == ["adapter"] else [f"{name}: {name}" for name in names]
    )
