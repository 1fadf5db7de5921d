"""Programs in several processes on the CPU, as torchrun starts one on each GPU."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def torchrun(
    program: Path, *arguments: str, processes: int = 2, options: tuple[str, ...] = ()
) -> subprocess.CompletedProcess:
    """options: of torchrun itself."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    return subprocess.run(
        [*launcher, *options, str(program), *arguments],
        # gloo's connections of the processes before would be in the way of those after a restart.
        env=environment() | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        start_new_session=True,  # for signals to a whole group of processes
    )


def environment() -> dict[str, str]:
    """Variables of processes that find our modules and those of their folder, and see no GPU."""
    paths = [str(ROOT), str(ROOT / "kernels"), ".", os.environ.get("PYTHONPATH", "")]
    # `accelerate launch --cpu --num_processes 2` starts one process, and says nothing.
    own = {"ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return os.environ | own | {"PYTHONPATH": os.pathsep.join(paths)}
