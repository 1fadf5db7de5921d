"""Sizes in tokens distributed over bins: rows of a capacity, parts of equal sums, and the processes
of a step.
"""

from collections.abc import Sequence
from heapq import heappop, heappush, heapreplace
from math import inf

from fastp3o.errors import UserError


def first_fit_decreasing(sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """Bins of indices; the largest first, each into the first bin with room. Ties keep their order."""
    bins: list[list[int]] = [[] for _ in sizes]
    # A tree: node n is above 2 n and 2 n + 1 and holds the larger room of the two, down to the
    # bins, in their order. A bin that is still empty takes anything.
    leaves = 1 << (len(sizes) - 1).bit_length()
    room: list[float] = [inf] * (2 * leaves)
    for index in largest_first(sizes):
        size, node = sizes[index], 1
        while node < leaves:
            node = 2 * node if room[2 * node] >= size else 2 * node + 1
        members = bins[node - leaves]
        room[node] = (room[node] if members else capacity) - size
        members.append(index)
        while node > 1:
            node //= 2
            room[node] = max(room[2 * node], room[2 * node + 1])
    return [members for members in bins if members]


def balanced(sizes: Sequence[int], parts: int) -> list[list[int]]:
    """Splits indices into `parts` lists of equal length, with sums of sizes as even as a greedy
    choice makes them. Raises ValueError if the indices do not divide evenly.
    """
    if len(sizes) % parts:
        raise UserError(f"{len(sizes)} groups cannot be split evenly into {parts} parts")
    members: list[list[int]] = [[] for _ in range(parts)]
    lightest = [(0, part) for part in range(parts)]  # a heap of those that are not full
    for index in largest_first(sizes):
        total, part = heappop(lightest)
        members[part].append(index)
        if len(members[part]) < len(sizes) // parts:
            heappush(lightest, (total + sizes[index], part))
    return [sorted(part) for part in members]


def deal(steps: Sequence[Sequence[int]], processes: int) -> list[list[list[int]]]:
    """Deals out the work of some steps, given its sizes in tokens. Returns indices into them for
    each step and process. In every step each process gets about as many tokens. Too little work for
    all goes to those with the least before.
    """
    dealt = []
    before = [0] * processes
    for sizes in steps:
        parts: list[list[int]] = [[] for _ in range(processes)]
        lightest = sorted((0, before[process], process) for process in range(processes))  # a heap
        for index in largest_first(sizes):
            tokens, earlier, process = lightest[0]
            parts[process].append(index)
            heapreplace(lightest, (tokens + sizes[index], earlier, process))
        for tokens, _, process in lightest:
            before[process] += tokens
        dealt.append([sorted(part) for part in parts])
    return dealt


def largest_first(sizes: Sequence[int]) -> list[int]:
    """Indices by falling size. Ties keep their order."""
    return sorted(range(len(sizes)), key=lambda index: -sizes[index])
