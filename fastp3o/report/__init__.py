"""Runs to look at: what one or several runs have logged, side by side."""
