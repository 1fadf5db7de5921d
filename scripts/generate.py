"""The command `fastp3o generate`: `python scripts/generate.py --help` explains it."""

from fastp3o.__main__ import main

if __name__ == "__main__":
    main("generate")
