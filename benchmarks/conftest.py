"""What the results say of the machine, of what could not be measured, and when to stop.

FASTP3O_BENCHMARK_SECONDS: benchmarks that would begin later than this after the first are skipped, so that the results
of the others are written.
"""

import os
import platform
import subprocess
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
import torch

from benchmarks.measure import release
from benchmarks.peers import AbsentError

PACKAGES = ("torch", "triton", "transformers", "liger-kernel", "cut-cross-entropy", "trl")
STARTED = time.monotonic()
NOT_MEASURED = pytest.StashKey[list]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[NOT_MEASURED] = []


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
        pytest.skip(f"absent: {error}")
    except torch.OutOfMemoryError:
        pytest.skip("out of memory")
    except Exception as error:
        if "fastp3o" in item.name:
            raise
        pytest.skip(f"failed: {type(error).__name__}: {str(error).splitlines()[0][:200] if str(error) else ''}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo):
    report = yield
    if report.outcome != "passed":
        reason = report.longrepr[2].removeprefix("Skipped: ") if report.skipped else "failed"
        item.config.stash[NOT_MEASURED].append({"name": item.name, "reason": reason})
    return report


def pytest_benchmark_update_json(config: pytest.Config, benchmarks: list, output_json: dict) -> None:
    """The figures, without each round's and without the machine's name."""
    output_json.clear()
    output_json["environment"] = environment()
    output_json["benchmarks"] = [benchmark["extra_info"] for benchmark in benchmarks_of(benchmarks)]
    output_json["not_measured"] = config.stash[NOT_MEASURED]


def benchmarks_of(benchmarks: list) -> list[dict]:
    return [benchmark if isinstance(benchmark, dict) else benchmark.as_dict() for benchmark in benchmarks]


def environment() -> dict[str, object]:
    def installed(name: str) -> str | None:
        try:
            return version(name)
        except PackageNotFoundError:
            return None

    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    commit = subprocess.run(git, capture_output=True, text=True).stdout.strip()
    cuda = torch.cuda.is_available()
    return {
        "device": torch.cuda.get_device_name() if cuda else f"CPU ({torch.get_num_threads()} threads)",
        "cuda": torch.version.cuda if cuda else None,
        "python": platform.python_version(),
        "packages": {name: installed(name) for name in PACKAGES},
        "commit": commit or os.environ.get("FASTP3O_COMMIT"),
        "date": time.strftime("%Y-%m-%d"),
    }
