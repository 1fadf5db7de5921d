"""`runs_of_a_process.py` where --precision auto is fp16, as on a GPU, and models leave it for
bf16-autocast.
"""

import runpy
from pathlib import Path

from fastp3o.runtime import precision
from fastp3o.training import setup

precision.multiplies = lambda _: True
setup.choose_precision = lambda *_: precision.named_precision("fp16")._replace(automatic=True)
runpy.run_path(str(Path(__file__).with_name("runs_of_a_process.py")), run_name="__main__")
