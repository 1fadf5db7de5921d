"""The command `fastp3o reward`: `python scripts/reward_model.py --help` explains it."""

from fastp3o.__main__ import main

if __name__ == "__main__":
    main("reward")
