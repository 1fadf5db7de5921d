"""benchmarks/README.md: which machines were measured, how many goals are met, and the largest news."""

from benchmarks.environment import described, machine, origin
from benchmarks.goals import CPU, GOALS, GPU, goals_table
from benchmarks.markdown import bullet, markdown
from benchmarks.pages.sources import Records, rates, results
from benchmarks.records import CPU_RECORDS, GPU_RECORD, NOT_MEASURED, figure, select, spread
from benchmarks.results_file import name_of


def link(name: str, text: str = "record") -> str:
    return f"[{text}](results/{name})"


def devices(records: Records) -> str:
    """What was measured on which machine, and how many goals are met."""
    gpu, cpu = records[GPU_RECORD], [records[name]["environment"] for name in CPU_RECORDS]
    links: dict[str, list[str]] = {}
    for name in CPU_RECORDS:
        links.setdefault(origin(records[name]["environment"]), []).append(
            link(name, name.partition(".")[0])
        )
    sources = "; ".join(f"{', '.join(names)} at {found}" for found, names in links.items())
    packages = ", ".join(
        f"{name} {version}" for name, version in cpu[0]["packages"].items() if version
    )
    lines = [
        f"**GPU**: {described(gpu['environment'])} ({link(GPU_RECORD)}). {goals_met(records, GPU)}. "
        f"{tests_passed(gpu)}.",
        f"**CPU**: {' and '.join(dict.fromkeys(map(machine, cpu)))}; {packages}; {sources}. {goals_met(records, CPU)}.",
    ]
    return "\n".join(map(bullet, lines))


def goals_met(records: Records, device: str) -> str:
    verdicts = [
        goal.verdict(results(records, device)).met for goal in GOALS if goal.device == device
    ]
    measured = [verdict for verdict in verdicts if verdict != NOT_MEASURED]
    met = f"{measured.count('met')} of {len(measured)} goals that were measured are met"
    return f"{met}, {len(verdicts)} were set ([table](#goals))"


def tests_passed(record: dict) -> str:
    """An old record names the tests that failed and does not count the others."""
    if "tests" in record:
        passed = f"{record['tests']['passed']:,} tests passed there"
        failed = record["tests"]["failed"]
    else:
        passed = "How many tests passed there is not recorded"
        failed = [entry["name"] for entry in record["not_measured"] if entry["reason"] == "failed"]
    names = dict.fromkeys(name_of(test).partition("[")[0] for test in failed)
    return f"{passed}, {len(failed)} failed" + (f" (`{'`, `'.join(names)}`)" if failed else "")


def products(records: Records) -> str:
    """The largest piece of news about GPUs."""
    found = select(results(records, GPU), level="model")
    update, logprobs = (
        [r for r in found if r["passes"] == f"{kind}, prompts of 350, 2 responses of 40"]
        for kind in ("update", "log-probs")
    )
    layouts = select(results(records, GPU), level="training")
    packing = "plain packing was timed there too" if layouts else "packing was not timed there"
    return bullet(
        f"**On a GPU** one update of 1 B parameters takes {figure(update, 'ratio_to_bare')} × the time of its own "
        f"matrix products ({spread(rates(update), '{:.0%}')} of their rate), log-probs "
        f"{figure(logprobs, 'ratio_to_bare')} × ({spread(rates(logprobs), '{:.0%}')}); {packing}."
    )


def goals(records: Records) -> str:
    return markdown(goals_table(results(records, GPU) + results(records, CPU)))
