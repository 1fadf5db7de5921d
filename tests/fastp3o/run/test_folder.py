import os
from pathlib import Path

import pytest
import yaml
from accelerate import Accelerator

from fastp3o.config import StageConfig
from fastp3o.errors import UserError
from fastp3o.run.folder import check_output_dir, claim, clear_away, release, write_config


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def config(folder: str = "run", **changes) -> StageConfig:
    return StageConfig(**({"model": "some/model", "output_dir": folder} | changes))


def tree(folder: str = ".") -> dict[str, bytes | None]:
    return {
        str(path): path.read_bytes() if path.is_file() else None
        for path in sorted(Path(folder).rglob("*"))
    }


def start(folder: str = "run", **changes) -> None:
    claimed = claim(Accelerator(cpu=True), config(folder, **changes))
    write_config(claimed, config(folder, **changes))
    release(claimed)


def test_a_folder_with_a_run_needs_resume():
    release(claim(Accelerator(cpu=True), config()))  # a start that failed claims nothing
    Path("run/config.yaml.unfinished-0123456789ab").touch()
    start()
    start()  # the first has made no step
    Path("run/metrics.jsonl").touch()
    said = "continue it with --resume, remove it with --overwrite, or name another --output_dir"
    for function in (check_output_dir, claim):
        with pytest.raises(FileExistsError, match=said):
            function(Accelerator(cpu=True), config())
    start(resume=True)


def test_overwrite_removes_what_runs_have_written_and_nothing_else():
    start(seed=7)
    written = yaml.safe_load(Path("run/config.yaml").read_text())
    assert (written["model"], written["seed"]) == ("some/model", 7)
    # what is None stands nowhere, so that the file can be given as one of flags
    assert "limit" not in written
    assert sorted(os.listdir("run")) == ["config.yaml", "fastp3o.lock"]
    for name in ("state", "checkpoint-000002", "trackers", "best"):
        Path("run", name).mkdir()
    for name in ("metrics.jsonl", "rollouts.jsonl", "eval.jsonl", "run/../run/progress.png"):
        Path("run", name.rpartition("/")[2]).write_text("{}")
    check_output_dir(Accelerator(cpu=True), config(overwrite=True))
    assert Path("run/state").exists()
    Path("run/notes.txt").write_text("mine")
    for function in (check_output_dir, claim):
        with pytest.raises(
            FileExistsError, match=r"no run has written notes.txt in run: move it away"
        ):
            function(Accelerator(cpu=True), config(overwrite=True))
    Path("run/notes.txt").unlink()
    start(overwrite=True)
    # read again, it would remove the run
    assert "overwrite" not in Path("run/config.yaml").read_text()
    assert sorted(path.name for path in Path("run").iterdir()) == ["config.yaml", "fastp3o.lock"]
    with pytest.raises(UserError, match="--resume and --overwrite cannot be combined"):
        config(overwrite=True, resume=True)


@pytest.mark.parametrize(
    "name", ["precious.txt", "model/precious.txt", "config.yaml", "state/step-000001/x"]
)
@pytest.mark.parametrize("resume", [False, True])
def test_a_folder_that_is_no_run_is_not_touched(name, resume):
    Path("run", name).parent.mkdir(parents=True)
    Path("run", name).write_text("x")
    before = tree()
    for function in (check_output_dir, claim):
        with pytest.raises(
            FileExistsError,
            match=r"is not empty and was not written by this version of .* \(.*\): name a new",
        ):
            function(Accelerator(cpu=True), config(resume=resume))
    assert tree() == before


@pytest.mark.parametrize("model", ["run", "run/model", "elsewhere/../run/model", "link"])
def test_the_starting_model_is_never_where_the_run_writes(model):
    Path("run/model").mkdir(parents=True)
    Path("elsewhere").mkdir()
    Path("link").symlink_to("run/model")
    with pytest.raises(ValueError, match=r"--model .* lies in --output_dir run, .* name another"):
        check_output_dir(Accelerator(cpu=True), config(model=model, resume=True))


def test_leftovers_of_our_own_go_and_others_stay():
    start()
    hexadecimal = "0123456789ab"
    # The model that was about to be replaced gets its name back.
    Path("run", f"best.replaced-{hexadecimal}").mkdir()
    Path("run", f"best.replaced-{hexadecimal}", "before").touch()
    ours = [f"{name}.unfinished-{hexadecimal}" for name in ("model", "best", "checkpoint-000002")]
    ours += [f"stopped-in-000001/model.unfinished-{hexadecimal}", f"model.replaced-{hexadecimal}"]
    others = [
        "model",
        "state",
        "model.unfinished-mine",
        f"notes.unfinished-{hexadecimal}",
        "stopped-in-000001/model",
    ]
    for name in [*ours, *others]:
        Path("run", name).mkdir(parents=True)
        Path("run", name, "x").touch()
    Path("run", f"config.yaml.unfinished-{hexadecimal}").touch()
    clear_away(Path("run"))
    assert all(Path("run", name, "x").exists() for name in others)
    assert not [name for name in ours if Path("run", name).exists()]
    assert not Path("run", f"config.yaml.unfinished-{hexadecimal}").exists()
    assert os.listdir("run/best") == ["before"]
