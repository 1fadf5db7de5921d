"""The command `fastp3o preference`: `python scripts/preference.py --help` explains it."""

from fastp3o.__main__ import main

if __name__ == "__main__":
    main("preference")
