"""The table of what each objective costs here and in other libraries."""

from benchmarks.goals import NOT_MEASURED, Results, select

WAYS = ("fastp3o", "eager", "TRL", "Liger")
ABSENT = "–"


def objectives(cpu: Results, gpu: Results) -> list[list[str]]:
    """One row per objective; each cell has the numbers of all WAYS between slashes. Header first."""
    cpu, gpu = (select(results, level="objectives") for results in (cpu, gpu))
    lines = [["objective", "operations, F", "extra MB", "× bare products, CPU", "× bare products, GPU"]]
    for name in dict.fromkeys(result["objective"] for result in cpu + gpu):
        cpu_results, gpu_results = (select(results, objective=name) for results in (cpu, gpu))
        counted = [
            figures(cpu_results or gpu_results, "counted_operations", "{:.3g}"),
            figures(cpu_results or gpu_results, "extra_gb", "{:.0f}", 1e3),
        ]
        ratios = (figures(results, "ratio_to_bare", "{:.2f}") for results in (cpu_results, gpu_results))
        lines.append([name, *counted, *ratios])
    return lines


def figures(results: Results, key: str, form: str, times: float = 1.0) -> str:
    if not results:
        return NOT_MEASURED
    found = {result["implementation"]: result[key] for result in results if result[key] is not None}
    return " / ".join(form.format(times * found[way]) if way in found else ABSENT for way in WAYS)
