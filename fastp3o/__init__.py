"""fastp3o: a trainer for Pairwise Proximal Policy Optimization (P3O, arXiv 2310.00212).

`train` does from Python what the scripts do (training/api.py). Names are imported when they are
first used: torch alone takes seconds. __init__.pyi has them, with their modules.
"""

import importlib
import re
from pathlib import Path
from typing import Any

from fastp3o.errors import naming_the_extra

# That of fastp3o_kernels, whose import takes torch's seconds; a test compares them.
__version__ = "0.1.0"

STUB = Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8")
HOME = {
    name: module
    for module, name in re.findall(r"^from (\S+) import \w+ as (\w+)$", STUB, re.MULTILINE)
}
__all__ = sorted(HOME)


def __getattr__(name: str) -> Any:
    if name not in HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with naming_the_extra():
        return getattr(importlib.import_module(HOME[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
