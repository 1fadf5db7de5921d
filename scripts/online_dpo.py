"""The command `fastp3o online_dpo`: `python scripts/online_dpo.py --help` explains it."""

from fastp3o.__main__ import main

if __name__ == "__main__":
    main("online_dpo")
