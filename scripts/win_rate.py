"""The command `fastp3o win_rate`: `python scripts/win_rate.py --help` explains it."""

from fastp3o.__main__ import main

if __name__ == "__main__":
    main("win_rate")
