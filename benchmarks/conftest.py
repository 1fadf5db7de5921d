"""Adds the machine and what could not be measured to the results, and stops in time.

FASTP3O_BENCHMARK_SECONDS: benchmarks that would begin later than this after the start are skipped, and recorded so.
"""

import json
import os
import platform
import subprocess
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from traceback import clear_frames

import pytest
import torch

from benchmarks.measure import release
from benchmarks.peers import AbsentError
from benchmarks.shapes import TOKENS

PACKAGES = ("torch", "triton", "transformers", "liger-kernel", "cut-cross-entropy", "trl")
STARTED = time.monotonic()
RECORD = pytest.StashKey[dict]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--results", type=Path, help="JSON to write, anew after every benchmark.")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[RECORD] = {"environment": environment(), "benchmarks": [], "not_measured": []}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=order)


def order(item: pytest.Item) -> tuple[bool, bool, bool, int, bool, bool, bool]:
    """A run that ends early has measured what the goals are about, and every peer at the first number of tokens.

    Then come whole updates, rollouts and iterations, the other numbers of tokens, more of the peers that compile for
    long, other objectives, and what only explains.
    """
    callspec = getattr(item, "callspec", None)
    tokens = TOKENS.index(callspec.params.get("tokens", TOKENS[0])) if callspec else 0
    explains = any(word in item.name for word in ("apart", "without_gradients"))
    peers = "of_peers" in item.name
    whole = any(word in item.name for word in ("rollouts", "iteration"))
    return explains, "objective" in item.name, peers and tokens > 0, tokens, whole, "training" in item.name, peers


@pytest.fixture(autouse=True)
def within_the_time():
    limit = float(os.environ.get("FASTP3O_BENCHMARK_SECONDS", "inf"))
    if time.monotonic() - STARTED > limit:
        pytest.skip(f"out of time: {limit:.0f} seconds have passed")
    yield
    release()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item):
    """A peer that is absent, or does not fit into memory, is a result."""
    try:
        return (yield)
    except (ImportError, AbsentError) as error:
        reason = f"absent: {error}"
    except torch.OutOfMemoryError as error:
        # Its frames would keep their tensors while the next benchmark runs.
        clear_frames(error.__traceback__)
        reason = "out of memory"
    except Exception as error:
        if "fastp3o" in item.name:
            raise
        clear_frames(error.__traceback__)
        reason = f"failed: {type(error).__name__}: {str(error).partition(chr(10))[0][:200]}"
    pytest.skip(reason)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo):
    report = yield
    record, path = item.config.stash[RECORD], item.config.getoption("--results")
    if report.outcome != "passed":
        reason = report.longrepr[2].removeprefix("Skipped: ") if report.skipped else "failed"
        record["not_measured"].append({"name": item.name, "reason": reason})
    elif report.when == "call":
        record["benchmarks"].append(item.funcargs["benchmark"].extra_info)
    if path and (report.when == "call" or report.outcome != "passed"):
        path.write_text(as_lines(record))
    return report


def as_lines(record: dict) -> str:
    """JSON with a line for each benchmark."""
    parts = [f'"environment": {json.dumps(record["environment"])}']
    for key in ("benchmarks", "not_measured"):
        lines = ",\n".join(json.dumps(entry) for entry in record[key])
        parts.append(f'"{key}": [\n{lines}\n]' if lines else f'"{key}": []')
    return "{" + ",\n".join(parts) + "}\n"


def environment() -> dict[str, object]:
    def installed(name: str) -> str | None:
        try:
            return version(name)
        except PackageNotFoundError:
            return None

    git = f"git -C '{Path(__file__).parent}' describe --always --dirty"
    commit = subprocess.run(git, shell=True, capture_output=True, text=True).stdout.strip()
    cuda = torch.cuda.is_available()
    return {
        "device": torch.cuda.get_device_name() if cuda else f"CPU ({torch.get_num_threads()} threads)",
        "cuda": torch.version.cuda if cuda else None,
        "python": platform.python_version(),
        "packages": {name: installed(name) for name in PACKAGES},
        "commit": commit or os.environ.get("FASTP3O_COMMIT"),
        "date": time.strftime("%Y-%m-%d"),
    }
