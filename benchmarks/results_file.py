"""The JSON of a run: what was measured, what was not and why, and what is being measured.

    environment     the machine and the versions; None until a process has said them
    benchmarks      a dict of figures each
    not_measured    name and reason each
    finished        tests that need not run again, by their node ids; failed: those of fastp3o among them that failed;
                    skipped: those that could not run there, and peers without figures
    running         the test that runs, None between two
    late            tests that were killed as the time ended: they come last the next time
    complete        whether no test is left

A file is replaced whole, so that a reader finds the old one or the new one, whenever the writer was
killed.
"""

import json
import os
from collections.abc import Iterable
from pathlib import Path

OUT_OF_TIME = "out of time"
LISTS = ("benchmarks", "not_measured", "finished", "failed", "skipped", "late")
# What makes several results of one rollout or iteration: each sampler or trainer is a test of its
# own.
PARTS = ("ways", "trainers")


def empty() -> dict:
    return {"environment": None, **{name: [] for name in LISTS}, "running": None, "complete": False}


def load(path: Path) -> dict:
    """An empty record where there is no file."""
    return empty() | json.loads(path.read_text()) if path.exists() else empty()


def write(path: Path, record: dict) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f"{path.name}.{os.getpid()}.new")
    new.write_text(as_lines(record))
    new.replace(path)


def as_lines(record: dict) -> str:
    """JSON with a line for each entry of a list."""
    parts = []
    for key, value in record.items():
        if isinstance(value, list) and value:
            lines = ",\n".join(json.dumps(entry) for entry in value)
            parts.append(f"{json.dumps(key)}: [\n{lines}\n]")
        else:
            parts.append(f"{json.dumps(key)}: {json.dumps(value)}")
    return "{" + ",\n".join(parts) + "}\n"


def is_ours(test: str) -> bool:
    """Whether a failure of this test is fastp3o's; else it is a result of a peer's. test: its node
    id.
    """
    return "benchmarks/" not in test or "fastp3o" in test.partition("::")[2]


def name_of(test: str) -> str:
    """The function and parameters of a node id."""
    return test.partition("::")[2] or test


def without_the_unbegun(record: dict) -> dict:
    """Without what only the time was too short for. A test that runs still was killed as it ended."""
    late = [*record["late"], *filter(None, [record["running"]])]
    left = [
        entry for entry in record["not_measured"] if not entry["reason"].startswith(OUT_OF_TIME)
    ]
    return record | {"not_measured": left, "late": late, "running": None, "complete": False}


def unbegun(record: dict) -> int:
    return sum(entry["reason"].startswith(OUT_OF_TIME) for entry in record["not_measured"])


def end_running(record: dict, reason: str) -> dict:
    """The test that ran when its process ended counts as finished, with a reason why it has no
    figures.
    """
    test = record["running"]
    if test is None:
        return record
    failed = [*record["failed"], test] if is_ours(test) else record["failed"]
    missing = [*record["not_measured"], {"name": name_of(test), "reason": reason}]
    finished = [*record["finished"], test]
    return record | {
        "not_measured": missing,
        "finished": finished,
        "failed": failed,
        "running": None,
    }


def merged(records: Iterable[dict]) -> dict:
    """One record of several, as reports read it. tests: how many of fastp3o's tests passed, without
    benchmarks, and the names of all that failed.
    """
    records = list(records)
    environments = [record["environment"] for record in records if record["environment"]]
    lists = {
        name: [entry for record in records for entry in record[name]]
        for name in ("benchmarks", "not_measured")
    }
    failed = [test for record in records for test in record["failed"]]
    passed = {
        test for record in records for test in record["finished"] if test.startswith("tests/")
    }
    passed -= {test for record in records for test in (*record["failed"], *record["skipped"])}
    tests = {"passed": len(passed), "failed": failed}
    return {"environment": environments[0] if environments else None, **lists, "tests": tests}


def joined(benchmarks: list[dict]) -> list[dict]:
    """One result for all samplers of a rollout, and for all trainers of an iteration, in the order
    of the first.
    """
    found: dict[tuple, dict] = {}
    others: list[dict] = []
    for result in benchmarks:
        named = [name for name in PARTS if name in result]
        if not named:
            others.append(result)
            continue
        (parts,) = named
        shape = {key: value for key, value in result.items() if key != parts}
        first = found.setdefault(tuple(sorted(shape.items(), key=str)), shape | {parts: {}})
        first[parts] = first[parts] | result[parts]
    return others + list(found.values())
