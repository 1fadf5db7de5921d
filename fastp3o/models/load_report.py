"""What transformers reports of weights that it did not find or did not use is an error: it makes up those that lack."""

import logging
from collections.abc import Iterator, Set
from contextlib import contextmanager
from threading import get_ident
from typing import Any

from fastp3o.errors import UserError

NAMED = 3  # weights or tokens in an error


@contextmanager
def without_report() -> Iterator[None]:
    """In the block this thread's loading shows no table of missing and unexpected weights: the caller reads them in
    transformers' `output_loading_info`, for `require_whole`.
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
    name: str, loading: dict[str, Any], *, may_lack: Set[str] = frozenset(), may_exceed: Set[str] = frozenset()
) -> None:
    """Raises ValueError if the checkpoint's weights are not those of the model, which would get random ones."""
    if reason := missing(loading, may_lack, may_exceed):
        raise UserError(f"the checkpoint {name} does not hold the weights of its model: it {reason}")


def missing(loading: dict[str, Any], may_lack: Set[str] = frozenset(), may_exceed: Set[str] = frozenset()) -> str:
    """What a checkpoint lacks, or has beyond the weights of its model, in words; "" if nothing."""
    sizes = [f"{key} {list(has)} instead of {list(expected)}" for key, has, expected in loading["mismatched_keys"]]
    problems = {
        "lacks": sorted(set(loading["missing_keys"]) - may_lack),
        "also has": sorted(set(loading["unexpected_keys"]) - may_exceed),
        "has in another size": sizes,
    }
    return "; it ".join(f"{problem} {listed(keys)}" for problem, keys in problems.items() if keys)


def listed(names: list[str]) -> str:
    """The first few names and the number of the others."""
    more = len(names) - NAMED
    return ", ".join(names[:NAMED]) + (f" and {more} more" if more > 0 else "")
