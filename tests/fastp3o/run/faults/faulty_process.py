"""A command in one of several processes, which in the first of its starts meets a fault of
`FileCalls` in its folder: faulty_process.py PROCESS FAULT NUMBER COMMAND FLAGS ...
"""

import os
import sys
from pathlib import Path

from fastp3o.__main__ import main
from tests.fastp3o.run.faults.injection import FileCalls

process, fault, number = sys.argv[1:4]
sys.argv = ["fastp3o", *sys.argv[4:]]
if os.environ["RANK"] == process and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    FileCalls(Path("run"), **{fault: int(number)}).install()
main()
