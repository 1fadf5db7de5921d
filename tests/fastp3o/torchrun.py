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
    paths = [str(ROOT), str(ROOT / "kernels"), ".", os.environ.get("PYTHONPATH", "")]
    return subprocess.run(
        [*launcher, *options, str(program), *arguments],
        # `accelerate launch --cpu --num_processes 2` starts one process, and says nothing.
        env=os.environ
        | {"ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        # gloo's connections of the processes before would be in the way of those after a restart.
        | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=300,
        start_new_session=True,  # for signals to a whole group of processes
    )
