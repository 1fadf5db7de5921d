"""A real vLLM server on a CPU, in the environment that FASTP3O_VLLM names: `bash
scripts/test_vllm.sh` makes one. It takes a minute or more to start.
"""

import os
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Self

import httpx
import pytest

LONGEST_START = 900.0  # seconds
# A seeded request whose prompt is prefilled in parts kills the CPU's engine.
FLAGS = "--dtype float32 --max-model-len 1024 --enforce-eager --no-enable-chunked-prefill"
FLAGS += " --max-num-batched-tokens 8192"
SETTINGS = {
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


class RealServer:
    """Serves a model while its block runs; skips the test without FASTP3O_VLLM. flags: beside
    FLAGS. log: a file of what it says.
    """

    def __init__(self, model: str, flags: str, log: Path):
        if "FASTP3O_VLLM" not in os.environ:
            pytest.skip("needs FASTP3O_VLLM, a Python that has vLLM: bash scripts/test_vllm.sh")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url, self.log = f"http://127.0.0.1:{self.port}", log
        self.python = os.environ["FASTP3O_VLLM"]
        self.command = f"{self.python} -W ignore -m vllm.entrypoints.openai.api_server"
        self.command += f" --host 127.0.0.1 --port {self.port} --model {model} {FLAGS} {flags}"

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_) -> None:
        self.kill()

    def start(self) -> None:
        ours = {"PYTHONPATH", "TRITON_INTERPRET"}
        environment = {name: value for name, value in os.environ.items() if name not in ours}
        environment |= SETTINGS
        environment["PATH"] = f"{Path(self.python).parent}:{os.environ['PATH']}"
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self.command.split(),
                env=environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        try:
            self.wait()
        except BaseException:
            self.kill()
            raise

    def wait(self) -> None:
        """Until it answers."""
        end = time.monotonic() + LONGEST_START
        while time.monotonic() < end and self.process.poll() is None:
            try:
                if httpx.get(f"{self.url}/health").status_code == 200:
                    return
            except httpx.HTTPError:
                time.sleep(1.0)
        raise RuntimeError(f"the server has not started: {self.log.read_text()[-2000:]}")

    def kill(self) -> None:
        """With its engine, which is a process of its group."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
