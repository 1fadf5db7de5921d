"""Programs in several processes on the CPU, as torchrun starts them, but forked from a server that
has imported what they need: imports are most of the time of a short run.

Each test process has one server, itself a fork from before the first test. Every call has processes
of its own: nothing is left over from the call before, and a call that fails or hangs fails alone.
What torchrun itself does, restarts and signals, needs `torchrun`.
"""

import gc
import json
import os
import runpy
import subprocess
import sys
import tempfile
import traceback
from functools import cache
from pathlib import Path
from typing import Any, TextIO

import torch

from tests.fastp3o.run.faults.injection import fork_together, wait_together
from tests.fastp3o.torchrun import environment

LONGEST = 300.0  # seconds
COMMANDS = ("fastp3o.cli", "fastp3o.objectives.config.online")
# Imported by these commands when they run.
LATER = (
    *(
        "fastp3o.training.loop",
        "fastp3o.training.sft",
        "fastp3o.training.reward_model",
        "fastp3o.training.preferences",
    ),
    "fastp3o.generate.loop",
    *("torch._dynamo", "peft", "tests.fastp3o.models.model_families"),
    *("transformers.models.llama.modeling_llama", "transformers.models.llama.tokenization_llama"),
)


def together(
    program: Path, *arguments: str, processes=2, longest: float = LONGEST
) -> subprocess.CompletedProcess:
    """Runs a program in this many processes. `stdout` has all that each of them has said, one after
    the other. Raises TimeoutError, after killing them, if they have not ended after `longest`
    seconds.
    """
    with tempfile.TemporaryDirectory() as folder:
        logs = [f"{folder}/{number}" for number in range(processes)]
        call = {"program": str(program), "arguments": arguments, "folder": os.getcwd()}
        call |= {"logs": logs, "longest": longest}
        requests, answers = server()
        requests.write(json.dumps(call) + "\n")
        requests.flush()
        statuses = json.loads(answers.readline())
        said = "".join(Path(log).read_text() for log in logs)
    if not statuses:
        raise TimeoutError(f"{program} had not ended after {longest:.0f} s:\n{said}")
    return subprocess.CompletedProcess(
        [str(program), *arguments], next(filter(None, statuses), 0), said
    )


@cache
def server() -> tuple[TextIO, TextIO]:
    """Takes calls and gives exit statuses, each as a line. Ends with this process, as what it reads
    does.
    """
    if torch.cuda.is_available():  # which a fork would see as well, and cannot use
        command = [sys.executable, "-m", "tests.fastp3o.together"]
        started = subprocess.Popen(
            command, env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert started.stdin is not None
        assert started.stdout is not None
        return started.stdin, started.stdout
    (calls, to_server), (statuses, from_server) = os.pipe(), os.pipe()
    if not os.fork():
        try:
            os.close(to_server)
            os.environ.update(environment())
            torch.set_num_threads(1)
            serve(os.fdopen(calls), os.fdopen(from_server, "w"))
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)
    os.close(calls)
    os.close(from_server)
    return os.fdopen(to_server, "w"), os.fdopen(statuses)


def serve(calls: TextIO, statuses_of_calls: TextIO) -> None:
    for line in calls:
        import_what_runs_need()
        call = json.loads(line)
        pids = fork_together(lambda call=call: run(call), [Path(log) for log in call["logs"]])
        try:
            statuses = wait_together(pids, call["longest"])
        except TimeoutError:
            statuses = []
        print(json.dumps(statuses), file=statuses_of_calls, flush=True)


@cache
def import_what_runs_need() -> None:
    for module in (*COMMANDS, *LATER):
        __import__(module)
    gc.collect()
    gc.freeze()  # forks share its pages, and their collector looks at none of it


def run(call: dict[str, Any]) -> None:
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.chdir(call["folder"])
    sys.argv = [call["program"], *call["arguments"]]
    runpy.run_path(call["program"], run_name="__main__")


if __name__ == "__main__":
    serve(sys.stdin, sys.stdout)
