"""The records of results/, as reports and pages read them."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path

from benchmarks.results_file import joined

Results = list[dict]
RESULTS = Path(__file__).parent / "results"
NOT_MEASURED = "not measured"
# Of the suite. kernels.gpu.json is what `run_gpu.sh` has measured on a GPU.
GPU_RECORD = "kernels.gpu.json"
KERNELS, PRODUCTS = "kernels.cpu.json", "products.cpu.json"
CPU_RECORDS = (KERNELS, PRODUCTS, "objectives.cpu.json", "rollouts.cpu.json", "iteration.cpu.json")


def load(path: Path) -> dict:
    record = json.loads(path.read_text())
    return (
        record | {"benchmarks": joined(record["benchmarks"])} if "benchmarks" in record else record
    )


def results_of(records: Iterable[dict]) -> Results:
    """All results, each with `cuda`: whether a GPU gave it."""
    return [
        result | {"cuda": bool(record["environment"]["cuda"])}
        for record in records
        for result in record["benchmarks"]
    ]


def select(results: Results, **wanted: object) -> Results:
    return [
        result
        for result in results
        if all(result.get(key) == value for key, value in wanted.items())
    ]


def spread(values: Iterable[float | None], form: str = "{:.2f}") -> str:
    """The least and the largest value, in one where they are written alike."""
    found = sorted(value for value in values if value is not None)
    if not found:
        return NOT_MEASURED
    least, most = form.format(found[0]), form.format(found[-1])
    return least if least == most else f"{least} to {most}"


def figure(results: Results, key: str, form: str = "{:.2f}", **wanted: object) -> str:
    """The spread of a key in the results that have these values."""
    return spread((result.get(key) for result in select(results, **wanted)), form)


def ratios(results: Results, key: Callable[[dict], float], others: dict, mine: dict) -> list[float]:
    """A key of others over that of ours at the same shape."""
    shape = "N", "D", "V", "dtype", "prompt", "response", "K"
    return [
        key(other) / key(one)
        for one in select(results, **mine)
        for other in select(
            results, **others, **{name: one.get(name) for name in shape if name not in others}
        )
    ]
