"""Runs, one after the other, in one of several processes: runs_of_a_process.py SCRIPT FLAGS ... + SCRIPT FLAGS ..."""

import runpy
import sys
from itertools import groupby
from pathlib import Path

import torch
from accelerate.state import AcceleratorState, GradientState, PartialState

SCRIPTS = Path(__file__).parents[3] / "scripts"

# The processes stay together over all runs; precision and trackers are each run's own.
torch.distributed.destroy_process_group = lambda *_: None
for is_break, run in groupby(sys.argv[1:], lambda argument: argument == "+"):
    if not is_break:
        for state in (AcceleratorState, GradientState, PartialState):
            state._shared_state.clear()
        sys.argv = list(run)
        runpy.run_path(str(SCRIPTS / sys.argv[0]), run_name="__main__")
