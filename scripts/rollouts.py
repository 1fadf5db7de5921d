"""The command `fastp3o rollouts`: `python scripts/rollouts.py --help` explains it."""

from fastp3o.__main__ import main

if __name__ == "__main__":
    main("rollouts")
