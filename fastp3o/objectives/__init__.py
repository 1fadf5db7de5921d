"""Objectives: what sets one algorithm apart from another. README.md has the table of them."""
