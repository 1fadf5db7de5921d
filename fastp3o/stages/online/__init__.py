"""Stage 3: any online objective, in one loop that names none.

loop.py              the algorithm from top to bottom
setup.py             what it works with
dynamic_sampling.py  groups whose rewards are all equal are sampled again
report.py            what it says of an update
"""

from fastp3o.stages.online.loop import train

__all__ = ["train"]
