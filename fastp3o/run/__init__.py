"""Keeps a run: the loop around steps, its folder, logs, states, models, reports, and how it ends."""
