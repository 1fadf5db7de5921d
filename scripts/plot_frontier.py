"""The command `fastp3o frontier`: `python scripts/plot_frontier.py --help` explains it."""

from fastp3o.__main__ import main

if __name__ == "__main__":
    main("frontier")
