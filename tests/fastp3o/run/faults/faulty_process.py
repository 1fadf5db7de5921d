"""A script in one of several processes, which in the first of its starts meets a fault of `FileCalls` in its folder:
faulty_process.py PROCESS FAULT NUMBER SCRIPT FLAGS ...
"""

import os
import runpy
import sys
from pathlib import Path

from tests.fastp3o.run.faults.injection import FileCalls
from tests.fastp3o.torchrun import ROOT

process, fault, number = sys.argv[1:4]
sys.argv = sys.argv[4:]
if os.environ["RANK"] == process and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    FileCalls(Path("run"), **{fault: int(number)}).install()
runpy.run_path(str(ROOT / "scripts" / sys.argv[0]), run_name="__main__")
