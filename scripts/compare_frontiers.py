"""The command `fastp3o compare`: `python scripts/compare_frontiers.py --help` explains it."""

from fastp3o.__main__ import main

if __name__ == "__main__":
    main("compare")
