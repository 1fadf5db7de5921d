"""A plugin of pytest that writes results as soon as each is measured: `-p benchmarks.recording
--results=FILE`.

    --resume        goes on with a file of results: what it has is not run again
    FASTP3O_BENCHMARK_SECONDS    tests that would begin later than this after the start are skipped, and recorded so

A test that leaves the GPU unusable ends the process with DEVICE_LOST, so that a new one can go on
with the next.
"""

import os
import sys
import time
from pathlib import Path

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from benchmarks.environment import environment
from benchmarks.results_file import (
    OUT_OF_TIME,
    PARTS,
    empty,
    end_running,
    joined,
    load,
    name_of,
    unbegun,
    without_the_unbegun,
    write,
)

STARTED = time.monotonic()
RECORD = pytest.StashKey[dict]()
# The exit status of a process whose CUDA context is unusable.
DEVICE_LOST = 75


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--results", type=Path, help="JSON to write, anew after every test.")
    parser.addoption("--resume", action="store_true", help="Go on with the JSON of --results.")


def pytest_configure(config: pytest.Config) -> None:
    path = config.option.results = (
        config.getoption("--results") and config.getoption("--results").resolve()
    )
    record = without_the_unbegun(load(path)) if path and config.getoption("--resume") else empty()
    config.stash[RECORD] = record | {"environment": environment()}
    file(config)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    finished, late = (config.stash[RECORD][name] for name in ("finished", "late"))
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in finished])
    items[:] = sorted(
        (item for item in items if item.nodeid not in finished),
        key=lambda item: item.nodeid in late,
    )


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    limit = float(os.environ.get("FASTP3O_BENCHMARK_SECONDS", "inf"))
    if time.monotonic() - STARTED > limit:
        pytest.skip(f"{OUT_OF_TIME}: {limit:.0f} seconds have passed")
    item.config.stash[RECORD]["running"] = item.nodeid
    file(item.config)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo):
    report = yield
    record = item.config.stash[RECORD]
    if report.when == "call" and report.passed:
        record["finished"].append(item.nodeid)
        record["running"] = None
        benchmark = item.funcargs.get("benchmark") if isinstance(item, pytest.Function) else None
        if isinstance(benchmark, BenchmarkFixture):
            record["benchmarks"].append(benchmark.extra_info)
            say(item, figures_of(benchmark.extra_info))
    elif not report.passed:
        reason = report.longrepr[2].removeprefix("Skipped: ") if report.skipped else "failed"
        record_without_figures(record, item, reason)
        if "benchmarks/" in item.nodeid:
            say(item, reason)
    if not report.passed and device_is_lost():
        item.config.get_terminal_writer().line(f"{item.nodeid}: {report.longreprtext}")
        file(item.config)
        sys.stdout.flush()
        os._exit(DEVICE_LOST)
    file(item.config)
    return report


def figures_of(result: dict) -> str:
    """The figures of a result on one line: those that tables have, or of rollouts and iterations
    each way's rate.
    """
    if "ms" in result:
        extra = result.get("extra_gb")
        figures = [f"{result['ms']:.2f} ms"]
        figures += [f"{result['ratio_to_bare']:.2f} x bare"] if "ratio_to_bare" in result else []
        figures += [] if extra is None else [f"{1e3 * extra:,.0f} MB extra"]
        return ", ".join(
            [
                *figures,
                *(f"{name} {value:.1e}" for name, value in result.items() if "_error" in name),
            ]
        )
    ways = [(name, way) for part in PARTS for name, way in result.get(part, {}).items()]
    units = {"tokens_per_s": "tokens/s", "seconds": "s"}
    return ", ".join(
        f"{name} {way[key]:.3g} {unit}"
        for name, way in ways
        for key, unit in units.items()
        if key in way
    )


def say(item: pytest.Item, what: str) -> None:
    """Prints a row as soon as it is measured, in the place of pytest's dot."""
    if terminal := item.config.pluginmanager.get_plugin("terminalreporter"):
        terminal.write(f"\n{name_of(item.nodeid)}: {what}", flush=True)


def pytest_report_teststatus(report: pytest.TestReport) -> tuple[str, str, str] | None:
    has_row = "benchmarks/" in report.nodeid and report.when == "call" and not report.failed
    return (report.outcome, "", "") if has_row else None


def record_without_figures(record: dict, item: pytest.Item, reason: str) -> None:
    """reason: "failed" of fastp3o's tests; a peer's has an own one, and of tests skipped elsewhere
    none is kept.
    """
    if reason == "failed":
        record["running"] = item.nodeid
        record.update(end_running(record, reason))
        return
    out_of_time = reason.startswith(OUT_OF_TIME)
    if out_of_time or "benchmarks/" in item.nodeid:
        record["not_measured"].append({"name": name_of(item.nodeid), "reason": reason})
    if not out_of_time:
        record["finished"].append(item.nodeid)
        record["skipped"].append(item.nodeid)
    record["running"] = None


def pytest_sessionfinish(session: pytest.Session) -> None:
    session.config.stash[RECORD]["running"] = None
    file(session.config)


def pytest_terminal_summary(terminalreporter, config: pytest.Config) -> None:
    record = config.stash[RECORD]
    if record["benchmarks"]:  # also after Ctrl-C
        from benchmarks.report import summary

        terminalreporter.line(
            "\n" + summary([record | {"benchmarks": joined(record["benchmarks"])}])
        )
    if path := config.getoption("--results"):
        terminalreporter.line(
            f"\n{path}: python -m benchmarks.report FILE shows it, --resume goes on"
        )
    if left := unbegun(config.stash[RECORD]):
        terminalreporter.line(f"{left} tests were left out for lack of time")


def file(config: pytest.Config) -> None:
    if path := config.getoption("--results"):
        write(path, config.stash[RECORD])


def device_is_lost() -> bool:
    """Whether CUDA refuses everything from now on, as after an illegal access to memory."""
    try:
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False
