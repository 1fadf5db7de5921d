"""The command `fastp3o p3o`: `python scripts/p3o.py --help` explains it."""

from fastp3o.__main__ import main

if __name__ == "__main__":
    main("p3o")
