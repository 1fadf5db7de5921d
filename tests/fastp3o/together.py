"""Programs in several processes on the CPU, as torchrun starts them, but forked from a server that has imported what
they need: imports are most of the time of a short run.

Each test process has one server, which starts with its first use. Every call has processes of its own: nothing is left
over from the call before, and a call that fails or hangs fails alone. What torchrun itself does, restarts and signals,
needs `torchrun`.
"""

import gc
import json
import os
import runpy
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from tests.fastp3o.torchrun import ROOT, environment
from tests.fastp3o.training.faults.injection import fork_together, wait_together

LONGEST = 300.0  # seconds
SCRIPTS = ("p3o", "online", "sft", "reward_model", "preference", "generate")
# Imported by these scripts when they run.
LATER = (
    *("torch._dynamo", "peft", "torch.distributed.tensor.debug", "tests.fastp3o.models.model_families"),
    *("transformers.models.llama.modeling_llama", "transformers.models.llama.tokenization_llama"),
)


def together(
    program: Path, *arguments: str, processes: int = 2, longest: float = LONGEST
) -> subprocess.CompletedProcess:
    """Runs a program in this many processes. `stdout` has all that each of them has said, one after the other.

    Raises TimeoutError, after killing them, if they have not ended after `longest` seconds.
    """
    with tempfile.TemporaryDirectory() as folder:
        logs = [f"{folder}/{number}" for number in range(processes)]
        call = {
            "program": str(program),
            "arguments": arguments,
            "logs": logs,
            "folder": os.getcwd(),
            "longest": longest,
        }
        requests, answers = server().stdin, server().stdout
        assert requests is not None
        assert answers is not None
        requests.write(json.dumps(call) + "\n")
        requests.flush()
        statuses = json.loads(answers.readline())
        said = "".join(Path(log).read_text() for log in logs)
    if not statuses:
        raise TimeoutError(f"{program} had not ended after {longest:.0f} s:\n{said}")
    return subprocess.CompletedProcess([str(program), *arguments], next(filter(None, statuses), 0), said)


@cache
def server() -> subprocess.Popen:
    """Ends with this process, as its standard input does."""
    command = [sys.executable, "-m", "tests.fastp3o.together"]
    return subprocess.Popen(command, env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def serve() -> None:
    for script in SCRIPTS:
        runpy.run_path(str(ROOT / "scripts" / f"{script}.py"), run_name="imported")
    for module in LATER:
        __import__(module)
    gc.collect()
    gc.freeze()  # forks share its pages, and their collector looks at none of it
    for line in sys.stdin:
        call = json.loads(line)
        pids = fork_together(lambda call=call: run(call), [Path(log) for log in call["logs"]])
        try:
            statuses = wait_together(pids, call["longest"])
        except TimeoutError:
            statuses = []
        print(json.dumps(statuses), flush=True)


def run(call: dict[str, Any]) -> None:
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.chdir(call["folder"])
    sys.argv = [call["program"], *call["arguments"]]
    runpy.run_path(call["program"], run_name="__main__")


if __name__ == "__main__":
    serve()
