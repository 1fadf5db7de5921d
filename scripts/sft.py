"""The command `fastp3o sft`: `python scripts/sft.py --help` explains it."""

from fastp3o.__main__ import main

if __name__ == "__main__":
    main("sft")
