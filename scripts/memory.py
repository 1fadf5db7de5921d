"""The command `fastp3o memory`: `python scripts/memory.py --help` explains it."""

from fastp3o.__main__ import main

if __name__ == "__main__":
    main("memory")
