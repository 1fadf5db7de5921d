"""Work that is counted rather than timed: the same on every machine, however busy it is."""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def instructions(call: Callable[[], object]) -> int:
    """The instructions that Python runs in a call: what C does in one of them, such as a sum of an
    array, is one.
    """
    count = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Callable:
        nonlocal count
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count
