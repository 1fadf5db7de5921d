"""The command `fastp3o ppo`: `python scripts/ppo.py --help` explains it."""

from fastp3o.__main__ import main

if __name__ == "__main__":
    main("ppo")
