"""How much of the host's memory is free to this process, also where a container or a batch system
limits it.
"""

import os
from collections.abc import Iterator
from math import inf
from pathlib import Path

import psutil  # type: ignore[import-untyped]

CONTROL_GROUPS, MOUNTED = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


def free_host_memory() -> int:
    """Bytes that this process may take now: processes of one machine share what is free, on the
    machine or below the limits of their control groups.
    """
    free = min([psutil.virtual_memory().available, *free_below_limits()])
    return max(int(free), 0) // int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def free_below_limits() -> Iterator[float]:
    """Bytes that each control group of this process leaves of its limit. Version 2 has one tree of
    groups, version 1 one for memory. Linux counts files that it could forget as used: they are
    free.
    """
    try:
        groups = CONTROL_GROUPS.read_text().splitlines()
    except OSError:  # not Linux, or no control groups
        return
    for line in groups:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            top, names = MOUNTED, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            top = MOUNTED / "memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        # A container sees its own group at the top, where the path may be that of the host.
        group = top / path.strip("/")
        yield from (
            free_in(folder, *names)
            for folder in (group, *group.parents)
            if folder.is_relative_to(top)
        )


def free_in(group: Path, limit: str, used: str, forgettable: str) -> float:
    """Bytes that one control group leaves; infinite without a limit."""
    try:
        limited_to, taken = (
            float((group / name).read_text().replace("max", "inf")) for name in (limit, used)
        )
        statistics = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return inf
    return limited_to - taken + float(statistics.get(forgettable, 0))
