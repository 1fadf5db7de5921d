"""Stage 3: any online objective, in one loop that names none: loop.py is the algorithm from top to bottom."""

from fastp3o.stages.online.loop import train

__all__ = ["train"]
