"""The command `fastp3o online`: `python scripts/online.py --help` explains it."""

from fastp3o.__main__ import main

if __name__ == "__main__":
    main("online")
