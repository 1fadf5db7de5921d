"""The limits of control groups count, of either version, as a host or a container shows them."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from fastp3o.runtime import host_memory
from fastp3o.runtime.host_memory import free_host_memory

GIB = 2**30
FILES = {
    2: ("0::{}", "", "memory.max", "memory.current", "inactive_file"),
    1: (
        "9:cpu,cpuacct:/x\n4:memory:{}",
        "memory",
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        "total_inactive_file",
    ),
}


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """machine(version, path, groups): limit and use, in GiB, of groups by their folders; 64 GiB are
    free.
    """

    def make(version: int, path: str, groups: dict[str, tuple[str, float]]) -> None:
        line, top, limit, used, forgettable = FILES[version]
        (tmp_path / "cgroup").write_text(f"{line.format(path)}\n")
        for folder, (most, taken) in groups.items():
            group = tmp_path / "mounted" / top / folder
            group.mkdir(parents=True, exist_ok=True)
            (group / limit).write_text(f"{most if most == 'max' else int(most) * GIB}\n")
            (group / used).write_text(f"{int(taken * GIB)}\n")
            (group / "memory.stat").write_text(f"anon 5\n{forgettable} {GIB // 2}\nother 1\n")
        monkeypatch.setattr(host_memory, "CONTROL_GROUPS", tmp_path / "cgroup")
        monkeypatch.setattr(host_memory, "MOUNTED", tmp_path / "mounted")

    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=64 * GIB))
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    return make


@pytest.mark.parametrize("version", FILES)
@pytest.mark.parametrize(
    ("path", "groups", "free"),
    [
        ("/", {"": ("8", 3)}, 5.5),  # a container
        ("/docker/0123", {"": ("8", 3)}, 5.5),  # one whose group has the host's name
        (
            "/slurm/job/step",
            {"slurm/job/step": ("32", 1), "slurm/job": ("16", 2), "slurm": ("100", 3)},
            14.5,
        ),
        ("/slurm/job", {"slurm/job": ("4", 5)}, 0),
        ("/user", {"user": ("1000", 1)}, 64),
        ("/user", {}, 64),
    ],
)
def test_the_tightest_limit_counts(machine, monkeypatch, version, path, groups, free):
    machine(version, path, groups)
    assert free_host_memory() == free * GIB
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert free_host_memory() == free * GIB // 2


def test_no_limit_is_none_and_neither_is_what_cannot_be_read(machine, monkeypatch):
    machine(2, "/user", {"user": ("max", 1), "": ("max", 7)})
    assert free_host_memory() == 64 * GIB
    monkeypatch.setattr(host_memory, "CONTROL_GROUPS", Path("nowhere"))
    assert free_host_memory() == 64 * GIB
