"""Our upper bounds are the newest releases that were tried, and the script that tries newer ones
leaves them out.
"""

import runpy
from collections.abc import Callable
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parents[2]
NEWEST = runpy.run_path(str(ROOT / "scripts" / "newest.py"))
requirements: Callable[..., list[Requirement]] = NEWEST["requirements"]
TRIED = dict(
    line.lower().split("==")
    for line in (ROOT / "scripts" / "constraints.txt").read_text().split()
    if "==" in line
)


@pytest.mark.parametrize(
    "needed", requirements(("trainer", "lora", "math", "integrations")), ids=str
)
def test_what_users_install_is_bounded_at_the_newest_release_that_was_tried(needed: Requirement):
    """But for torch beneath the losses alone, whose users have chosen one."""
    assert needed.specifier.contains(TRIED[needed.name])
    if needed.name in (
        "torch",
        "triton",
    ):  # newer ones than the CPU build of constraints.txt were tried by hand
        return
    major, minor, *_ = Version(TRIED[needed.name]).release
    (bound,) = (Version(one.version) for one in needed.specifier if one.operator == "<")
    assert bound == Version(f"{major}.{minor + 1}")


def test_the_script_leaves_upper_bounds_out_and_says_which_are_exceeded():
    needed = Requirement("thing>=1.2,<1.5")
    assert NEWEST["without_upper_bound"](needed) == "thing>=1.2"
    assert NEWEST["taken"](needed, "1.4.9") == "thing 1.4.9"
    assert NEWEST["taken"](needed, "1.5.0") == "thing 1.5.0 is beyond our bound <1.5,>=1.2"
