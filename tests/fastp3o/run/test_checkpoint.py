"""States of a small model load as they were saved, and only whole ones are taken."""

import errno
import json
import os
import random
import shutil
import threading
from dataclasses import asdict, fields
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file
from torch import nn

from fastp3o.config import StageConfig
from fastp3o.files import write_file
from fastp3o.objectives.config.p3o import P3OConfig
from fastp3o.objectives.config.ppo import PPOConfig
from fastp3o.objectives.config.preferences import OFFLINE_OBJECTIVES, OnlineDPOConfig
from fastp3o.optimizer.optimizer import Optimizer
from fastp3o.rewards.scaling import DifferenceScaler
from fastp3o.run import tensors as store
from fastp3o.run.checkpoint import RunState, States
from fastp3o.run.manifest import (
    CorruptStateError,
    Manifest,
    ResumeError,
    checksum,
    content_checksum,
    read_manifest,
    read_unplaced,
    require_same_run,
)
from fastp3o.runtime.finiteness import NotFiniteError
from fastp3o.runtime.precision import choose_precision
from fastp3o.training.reward_model import RewardModelConfig
from fastp3o.training.sft import SFTConfig
from tests.fastp3o.backward import scaled_backward
from tests.fastp3o.run.faults.injection import flip

CONFIG = {"learning_rate": 0.1}


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.unused = nn.Linear(3, 2), nn.Linear(2, 2)

    def forward(self, x):
        return self.a(x)


class Trainer:
    def __init__(self, folder: Path, precision: str = "fp32", schedule: str = "cosine"):
        for seed in (random.seed, np.random.seed, torch.manual_seed):
            seed(0)
        config = StageConfig(
            model="", output_dir="", learning_rate=0.1, lr_schedule=schedule, warmup_steps=4
        )
        self.optimizer = Optimizer(
            Accelerator(cpu=True), Two(), choose_precision(precision, "fp32"), config, steps=20
        )
        self.scaler = DifferenceScaler(10.0)
        self.states = States(folder, self.optimizer, RunState({"scaler": self.scaler}))

    def train(self, first: int, last: int, *, save: bool = True) -> "Trainer":
        for step in range(first, last + 1):
            x = torch.full(
                (1, 3), random.random(), dtype=next(self.optimizer.model.parameters()).dtype
            )
            loss = self.optimizer.model(x).float().square().sum() * (1 + np.random.random())
            scaled_backward(self.optimizer, loss)
            self.optimizer.step(loss.detach())
            self.scaler(torch.randn(4, 2))
            if save:
                self.states.save(self.states.progress(step, evaluated=True), CONFIG, {})
        if save:
            self.states.place()
        return self

    def resume(self) -> tuple[int, list[str]]:
        manifest, lines = self.states.find()
        return (0 if manifest is None else self.states.load(manifest).step), lines

    def all(self) -> dict:
        tensors = self.optimizer.tensors() | self.optimizer.model.state_dict()
        values = {name: tensor.tolist() for name, tensor in tensors.items()} | {
            "rate": self.optimizer.learning_rate
        }
        return (
            values
            | self.optimizer.state_dict()
            | self.scaler.state_dict()
            | {"random": random.random()}
        )


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("schedule", ["cosine", "constant", "inverse_sqrt"])
def test_a_loaded_state_goes_on_as_the_saved_one_would_have(tmp_path, precision, schedule):
    whole = Trainer(tmp_path, precision, schedule).train(1, 3).train(4, 6, save=False).all()
    resumed = Trainer(tmp_path, precision, schedule)
    assert resumed.resume() == (3, [])
    assert resumed.train(4, 6, save=False).all() == whole


@pytest.mark.parametrize("full", [False, True], ids=["room on the disk", "none"])
def test_a_run_goes_on_while_its_state_is_written(tmp_path, monkeypatch, full):
    """The state has the bits of its step. Where it cannot be written the one before it stays."""
    Trainer(tmp_path / "at once").train(1, 2)
    beside = Trainer(tmp_path / "beside").train(1, 1)
    went_on = threading.Event()

    def write(path: Path, content: object) -> str:
        assert went_on.wait(60)
        if full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return write_file(path, content)

    monkeypatch.setattr(store, "write_file", write)
    beside.train(2, 2, save=False).states.save(
        beside.states.progress(2, evaluated=True), CONFIG, {}
    )
    beside.train(3, 5, save=False)
    before, unfinished = sorted(os.listdir(tmp_path / "beside"))
    assert (before, unfinished[:23]) == ("step-000001", "step-000002.unfinished-")
    went_on.set()
    if full:
        with pytest.raises(
            OSError, match=r"No space left on device: .*/step-000002.*/process-00000\.safetensors"
        ):
            beside.states.place()
        assert os.listdir(tmp_path / "beside") == [before]
        return
    beside.states.place()
    files = [
        {file.name: file.read_bytes() for file in tmp_path.glob(f"{name}/step-000002/*")}
        for name in ("at once", "beside")
    ]
    assert files[0] == files[1] != {}


@pytest.mark.parametrize(
    "manifest", [False, True], ids=["no process said so", "its manifest is written"]
)
def test_a_whole_state_that_was_never_placed_is_gone_on_from(tmp_path, manifest):
    """As after kill -9. Nothing changes before the run goes on from it."""
    killed = Trainer(tmp_path / "killed").train(1, 3)
    killed.train(4, 4, save=False).states.save(
        killed.states.progress(4, evaluated=True), CONFIG, {}
    )
    killed.states.written.result()
    if manifest:
        read_unplaced(killed.states.unfinished).write(killed.states.unfinished)
    before = shutil.copytree(tmp_path / "killed", tmp_path / "state")
    resumed = Trainer(before)
    assert resumed.states.find()[0].step == 4
    assert sorted(os.listdir(before)) == sorted(os.listdir(tmp_path / "killed"))
    assert resumed.resume() == (4, [])
    assert sorted(os.listdir(before)) == ["step-000003", "step-000004"]
    assert not [*before.glob("*/manifest-*")]
    assert Trainer(before).resume() == (4, [])
    assert (
        resumed.train(5, 6, save=False).all()
        == Trainer(tmp_path / "whole").train(1, 6, save=False).all()
    )


@pytest.mark.parametrize(
    "name", ["manifest-00000.json", "counters.json", "process-00000.safetensors"]
)
@pytest.mark.parametrize("damage", [flip, Path.unlink])
def test_a_state_that_was_never_placed_and_is_not_whole_is_none(tmp_path, name, damage):
    killed = Trainer(tmp_path / "killed").train(1, 1)
    killed.train(2, 2, save=False).states.save(
        killed.states.progress(2, evaluated=True), CONFIG, {}
    )
    killed.states.written.result()
    state = shutil.copytree(tmp_path / "killed", tmp_path / "state")
    (unfinished,) = state.glob("*.unfinished-*")
    damage(unfinished / name)
    assert Trainer(state).resume() == (1, [])


@pytest.mark.parametrize("room", [0, 2**40])
def test_tensors_are_written_block_by_block_without_pickle(tmp_path, monkeypatch, room):
    """Of any dtype and layout, and aligned, although some have an odd number of bytes. At once
    without room.
    """
    monkeypatch.setattr(store, "ELEMENTS_AT_ONCE", 20)
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=room))
    tensors = {
        f"{n}{kind}": torch.randn(n, 7).to(kind).T for n in (1, 5, 0) for kind in store.DTYPES
    }
    tensors["step"] = torch.tensor(3.0)
    header, *rest = store.blocks(tensors, {})
    assert max(map(len, rest)) == 20 * 8
    places = {name: json.loads(header[8:])[name]["data_offsets"] for name in tensors}
    assert not any(begin % tensors[name].element_size() for name, (begin, _) in places.items())
    write = store.copied_to_write(tmp_path / "part.safetensors", tensors)
    assert any(tmp_path.iterdir()) == (not room)
    sums = write()
    assert sums == {path.name: checksum(path) for path in tmp_path.iterdir()}
    store.load_tensors(
        tmp_path, filled := {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    )
    for read in (load_file(tmp_path / "part.safetensors"), filled):
        assert all(
            read[n].dtype == tensor.dtype and torch.equal(read[n], tensor)
            for n, tensor in tensors.items()
        )
    Trainer(tmp_path).train(1, 1)
    assert {path.suffix for path in (tmp_path / "step-000001").iterdir()} == {
        ".json",
        ".safetensors",
    }


def edit(folder: Path, recomputed: bool, **changes) -> None:
    content = {"version": 2, **asdict(read_manifest(folder)), **changes}
    sha256 = (
        content_checksum(content)
        if recomputed
        else json.loads((folder / "manifest.json").read_text())["sha256"]
    )
    (folder / "manifest.json").write_text(json.dumps(content | {"sha256": sha256}))


def put_a_folder_there(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (
            lambda folder: edit(folder, False, step=99),
            "manifest.json is damaged: its checksum differs",
        ),
        (
            lambda folder: edit(folder, False, evaluated=False),
            "manifest.json is damaged: its checksum differs",
        ),
        (
            lambda folder: edit(folder, True, version=1),
            "is of version 1, and this fastp3o reads version 2",
        ),
        (lambda folder: flip(folder / "counters.json"), "counters.json has a different checksum"),
        (lambda folder: flip(folder / "manifest.json"), "manifest.json is damaged"),
        (lambda folder: (folder / "counters.json").unlink(), "counters.json is missing"),
        (
            lambda folder: put_a_folder_there(folder / "counters.json"),
            "counters.json cannot be read",
        ),
    ],
)
def test_only_what_the_run_has_written_is_read(tmp_path, spoil, says):
    """When no state is whole, each problem is named and nothing changes."""
    Trainer(tmp_path).train(1, 2)
    spoil(tmp_path / "step-000002")
    step, (line,) = Trainer(tmp_path).resume()
    assert step == 1
    assert says in line
    spoil(tmp_path / "step-000001")
    (corrupt,) = tmp_path.glob("*.corrupt-*")
    corrupt.rename(tmp_path / "step-000002")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.*") if path.is_file()}
    with pytest.raises(
        CorruptStateError, match=f"no state is whole.*{says}.*step-000001 is corrupt.*{says}"
    ):
        Trainer(tmp_path).resume()
    assert {path: path.read_bytes() for path in tmp_path.rglob("*.*") if path.is_file()} == before


def test_what_file_systems_and_tools_leave_in_a_state_is_no_damage(tmp_path):
    Trainer(tmp_path).train(1, 2)
    (tmp_path / "step-000002" / ".nfs0000000000000001").touch()
    (tmp_path / "step-000002" / "@eaDir").mkdir()
    assert Trainer(tmp_path).resume()[0] == 2


def test_the_folders_of_the_first_state_are_on_the_disk_too(tmp_path, monkeypatch):
    synced = set()
    sync = os.fsync
    monkeypatch.setattr(
        os, "fsync", lambda descriptor: synced.add(os.fstat(descriptor).st_ino) or sync(descriptor)
    )
    Trainer(tmp_path / "run" / "state").train(1, 1)
    assert {(tmp_path / name).stat().st_ino for name in ("", "run", "run/state")} <= synced


def test_weights_that_are_not_finite_replace_no_state(tmp_path):
    trainer = Trainer(tmp_path).train(1, 2)
    with torch.no_grad():
        trainer.optimizer.model.a.weight[0, 0] = float("nan")
    with pytest.raises(NotFiniteError, match="a weight or a moment of AdamW is NaN or infinite"):
        trainer.states.save(trainer.states.progress(3, evaluated=True), CONFIG, {})
    assert sorted(os.listdir(tmp_path)) == ["step-000001", "step-000002"]


BEFORE = {"model": "m", "output_dir": "o", "prompts": "p", "reward": "r:f"}
HASHES = {"model": "1", "prompts": "2", "reward function": "3"}


def resume(*, before=BEFORE, hashes=HASHES, processes=1, **changes) -> list[str]:
    manifest = Manifest(4, True, 1, P3OConfig(**before).plain(), HASHES, {})
    return require_same_run(
        manifest, P3OConfig(**(before | {"resume": True} | changes)), hashes, processes
    )


CONFIGS = [
    P3OConfig,
    PPOConfig,
    OnlineDPOConfig,
    SFTConfig,
    RewardModelConfig,
    *OFFLINE_OBJECTIVES.values(),
]
FIXED = {
    "model",
    "seed",
    "batch_size",
    "prompts_per_update",
    "lora_rank",
    "clipping",
    "reference",
    "eval_prompts",
}


@pytest.mark.parametrize("config", CONFIGS)
def test_what_may_change_is_an_option(config):
    assert config.changeable() <= {field.name for field in fields(config)}
    assert not config.changeable() & (FIXED | {"objective"})


def test_what_takes_effect_is_said_in_one_line_each():
    assert resume(output_dir="moved", prompts="moved with the same contents") == []
    assert resume(
        learning_rate=0.5, kl_coef=0.1, hashes=HASHES | {"reward function": "9"}, processes=2
    ) == [
        "resuming with another kl_coef: 0.05 before, 0.1 now",
        "resuming with another kl_per_update: 0.3 before, None now by default",
        "resuming with another learning_rate: 1e-06 before, 0.5 now",
        "resuming with another source of the reward function",
        "resuming on another number of processes: 1 before, 2 now",
    ]


@pytest.mark.parametrize(
    "changes", [{"seed": 1}, {"prompts_per_update": 128, "prompts_per_minibatch": 4}]
)
def test_what_would_be_another_run_is_refused_by_name(changes):
    with pytest.raises(
        ResumeError, match=r"--resume: this would be a different run: .*or a new --output_dir"
    ) as refused:
        resume(**changes)
    assert all(f"--{name}" in str(refused.value) for name in changes)
    with pytest.raises(
        ResumeError, match=r"the content has changed since .*: --model \(m\), --prompts \(p\)"
    ):
        resume(hashes=HASHES | {"prompts": "9", "model": "8"})


def test_a_reference_that_is_a_mean_keeps_its_precision():
    changed = ["resuming with another precision: fp32 before, fp16 now"]
    assert resume(before=BEFORE | {"precision": "fp32"}, precision="fp16") == changed
    with pytest.raises(
        ResumeError, match=r"--precision \(fp32 before, fp16 now\)\. Use the previous values"
    ):
        resume(before=BEFORE | {"precision": "fp32", "reference_decay": 0.9}, precision="fp16")
