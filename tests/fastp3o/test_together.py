from pathlib import Path

import pytest

from tests.fastp3o.together import together

PROGRAM = """
import signal, sys
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
if sys.argv[1] == "fail" and rank == 1:
    raise SystemExit("lost")
if sys.argv[1] == "hang":
    print("waiting", flush=True)
    signal.pause()
ranks = torch.tensor(float(1 + rank))
dist.all_reduce(ranks)
print(f"sum {ranks.item():.0f}")
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return path


@pytest.mark.parametrize(("processes", "said"), [(1, "sum 1"), (2, "sum 3")])
def test_processes_work_together(program: Path, processes: int, said: str):
    done = together(program, "work", processes=processes)
    assert done.returncode == 0, done.stdout
    assert done.stdout.count(said) == processes


def test_a_call_fails_or_hangs_alone_and_says_so(program: Path):
    failed = together(program, "fail")
    assert failed.returncode != 0
    assert "lost" in failed.stdout
    with pytest.raises(TimeoutError, match="had not ended after 3 s:\\nwaiting"):
        together(program, "hang", longest=3)
    assert together(program, "work").returncode == 0
