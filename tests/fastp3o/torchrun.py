"""Programs in several processes on the CPU, as torchrun starts one on each GPU."""

import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]


def torchrun(program: Path, *arguments: str, nodes: int) -> tuple[int, str]:
    """Runs a program in two processes on one or two nodes, and returns an exit status and what was
    said.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        place = f"127.0.0.1:{free.getsockname()[1]}"
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--rdzv_backend",
        "c10d",
        "--rdzv_endpoint",
        place,
    ]
    command += [
        "--max-restarts",
        "3",
        "--nnodes",
        str(nodes),
        "--nproc_per_node",
        str(2 // nodes),
        str(program),
    ]
    # gloo's connections of the processes before would be in the way of those after a restart.
    variables = environment() | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    with tempfile.TemporaryFile("w+") as said:
        # A session of its own, for signals to a whole group of processes.
        options = {"env": variables, "stdout": said, "stderr": said, "start_new_session": True}
        agents = [subprocess.Popen([*command, *arguments], **options) for _ in range(nodes)]
        statuses = [agent.wait(timeout=300) for agent in agents]
        said.seek(0)
        return max(map(abs, statuses)), said.read()


def environment() -> dict[str, str]:
    """Variables of processes that find our modules and those of their folder, and see no GPU."""
    paths = [str(ROOT), str(ROOT / "kernels"), ".", os.environ.get("PYTHONPATH", "")]
    # `accelerate launch --cpu --num_processes 2` starts one process, and says nothing.
    own = {"ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return os.environ | own | {"PYTHONPATH": os.pathsep.join(paths)}
