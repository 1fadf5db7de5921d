"""For scripts/test_newest.sh: prints what fastp3o needs, without its upper bounds. With --taken,
prints the versions that are installed, and which of our bounds they exceed.
"""

import argparse
import tomllib
from importlib.metadata import version
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

PYPROJECT = Path(__file__).parents[1] / "pyproject.toml"
EXTRAS = ("trainer", "lora", "math", "dev")
# These decide as much, and come with what we name.
FURTHER = ("huggingface_hub", "numpy", "tokenizers")


def requirements(extras: tuple[str, ...] = EXTRAS) -> list[Requirement]:
    """What fastp3o and some of its extras name, with our bounds."""
    project = tomllib.loads(PYPROJECT.read_text())["project"]
    lines = [
        *project["dependencies"],
        *(line for extra in extras for line in project["optional-dependencies"][extra]),
    ]
    return [
        requirement
        for requirement in map(Requirement, lines)
        if requirement.name != project["name"]
    ]


def without_upper_bound(requirement: Requirement) -> str:
    lower = SpecifierSet(
        ",".join(str(bound) for bound in requirement.specifier if ">" in bound.operator)
    )
    return f"{requirement.name}{lower}"


def taken(requirement: Requirement, installed: str) -> str:
    """A line for the version that is installed, which says if it is beyond our bound."""
    within = requirement.specifier.contains(installed, prereleases=True)
    return f"{requirement.name} {installed}" + (
        "" if within else f" is beyond our bound {requirement.specifier}"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--taken", action="store_true")
    if parser.parse_args().taken:
        lines = {
            taken(one, version(one.name)) for one in [*requirements(), *map(Requirement, FURTHER)]
        }
    else:
        lines = {without_upper_bound(one) for one in requirements()}
    print(*sorted(lines, key=str.lower), sep="\n")
