"""Runs, one after the other, in one of several processes: runs_of_a_process.py COMMAND FLAGS ... +
COMMAND FLAGS ...
"""

import sys
from itertools import groupby

import torch
from accelerate.state import AcceleratorState, GradientState, PartialState

from fastp3o.__main__ import main

# The processes stay together over all runs; precision and trackers are each run's own.
torch.distributed.destroy_process_group = lambda *_: None
for is_break, run in groupby(sys.argv[1:], lambda argument: argument == "+"):
    if not is_break:
        for state in (AcceleratorState, GradientState, PartialState):
            state._shared_state.clear()
        sys.argv = ["fastp3o", *run]
        main()
