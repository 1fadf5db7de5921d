"""Turns transformers' report of missing or unused weights into an error: transformers itself
initializes missing weights at random and continues.
"""

import logging
from collections.abc import Iterator, Set
from contextlib import contextmanager
from threading import get_ident
from typing import Any

from fastp3o.errors import UserError
from fastp3o.sources import ModelSource

NAMED = 3  # weights or tokens in an error


@contextmanager
def without_report() -> Iterator[None]:
    """Within the block, loading in this thread prints no table of missing and unexpected weights:
    the caller reads them from transformers' `output_loading_info` and passes them to
    `require_whole`.
    """
    logger, thread = logging.getLogger("transformers.modeling_utils"), get_ident()

    def shown(record: logging.LogRecord) -> bool:
        return record.thread != thread or "LOAD REPORT" not in record.getMessage()

    logger.addFilter(shown)
    try:
        yield
    finally:
        logger.removeFilter(shown)


def require_whole(
    name: ModelSource,
    loading: dict[str, Any],
    *,
    may_lack: Set[str] = frozenset(),
    may_exceed: Set[str] = frozenset(),
) -> None:
    """Raises ValueError unless the checkpoint has exactly the weights of the model: missing ones
    would be random.
    """
    if reason := missing(loading, may_lack, may_exceed):
        raise UserError(
            f"the checkpoint {name} does not hold the weights of its model: it {reason}"
        )


def missing(
    loading: dict[str, Any], may_lack: Set[str] = frozenset(), may_exceed: Set[str] = frozenset()
) -> str:
    """Describes the weights that a checkpoint lacks, or has in addition to those of its model; ""
    if there are none.
    """
    sizes = [
        f"{key} {list(has)} instead of {list(expected)}"
        for key, has, expected in loading["mismatched_keys"]
    ]
    problems = {
        "lacks": sorted(set(loading["missing_keys"]) - may_lack),
        "also has": sorted(set(loading["unexpected_keys"]) - may_exceed),
        "has in another size": sizes,
    }
    return "; it ".join(f"{problem} {listed(keys)}" for problem, keys in problems.items() if keys)


def listed(names: list[str]) -> str:
    """The first few names, and how many more there are."""
    more = len(names) - NAMED
    return ", ".join(names[:NAMED]) + (f" and {more} more" if more > 0 else "")
