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


def test_processes_work_together_and_a_call_fails_or_hangs_alone_and_says_so(tmp_path: Path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    for processes, said in ((1, "sum 1"), (2, "sum 3")):
        done = together(program, "work", processes=processes)
        assert (done.returncode, done.stdout.count(said)) == (0, processes), done.stdout
    failed = together(program, "fail")
    assert failed.returncode != 0
    assert "lost" in failed.stdout
    with pytest.raises(TimeoutError, match="had not ended after 3 s:\\nwaiting"):
        together(program, "hang", longest=3)
    assert together(program, "work").returncode == 0
