"""What is found in a run's folder that no run has left there, and file systems that lack something."""

import errno
import fcntl
import os
from pathlib import Path

import pytest

from fastp3o.errors import UserError
from fastp3o.run import folder as folders
from fastp3o.training.loop import train
from tests.fastp3o.runs import assert_equal, config, weights


def test_a_linked_lock_and_damaged_notes_are_refused_and_a_lock_that_is_gone_is_made_again(
    tiny_model, workplace
):
    def run(**changes):
        train(
            config(tiny_model, "run", keep_best="reward", eval_prompts="prompts.jsonl", **changes)
        )

    def resume():
        run(updates=3, resume=True)

    train(config(tiny_model, "whole", updates=3))
    run(updates=2)
    lock, best = Path("run/fastp3o.lock"), Path("run/best/evaluation.json")
    Path("victim").write_text("somebody's")
    lock.unlink()
    lock.symlink_to(Path("victim").resolve())
    with pytest.raises(OSError, match=r"symbolic links: .*run/fastp3o\.lock"):
        resume()
    assert Path("victim").read_text() == "somebody's"
    lock.unlink()
    note = best.read_text()
    for damaged in ("", "[1]", "{}", '{"step": 1}', '{"step": 1, "reward": "x"}', note[:-9]):
        best.write_text(damaged)
        with pytest.raises(
            UserError, match=r"run/best/evaluation.json is damaged: restore it, or remove run/best"
        ):
            resume()
    best.write_text(note)
    Path("run/model").rename("run/elsewhere")
    Path("run/model").symlink_to("elsewhere")
    lock.unlink()
    resume()
    assert_equal(weights("whole"), weights("run"))
    assert not Path("run/model").is_symlink()


def test_a_file_system_without_locks_and_folder_syncs_is_told_in_a_line(
    tiny_model, workplace, monkeypatch, capsys
):
    fsync = os.fsync

    def no_folders(descriptor):
        if os.path.isdir(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.EINVAL, "Invalid argument")
        fsync(descriptor)

    def no_locks(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(os, "fsync", no_folders)
    monkeypatch.setattr(fcntl, "flock", no_locks)
    train(config(tiny_model, "run", updates=1))
    assert "run: its file system has no locks (No locks available)" in capsys.readouterr().out


def test_a_folder_that_is_swapped_while_a_run_trains_ends_it(tiny_model, workplace, monkeypatch):
    write = folders.require_claimed

    def swap(folder):
        monkeypatch.setattr("fastp3o.run.report.require_claimed", write)
        Path("run").rename("moved")
        Path("other").mkdir()
        Path("run").symlink_to("other")
        Path("run/fastp3o.lock").touch()
        write(folder)

    monkeypatch.setattr("fastp3o.run.report.require_claimed", swap)
    with pytest.raises(
        FileNotFoundError, match="run is no longer the folder in which this run began"
    ):
        train(config(tiny_model, "run", updates=3))
    assert [path.name for path in Path("run").iterdir()] == ["fastp3o.lock"]
