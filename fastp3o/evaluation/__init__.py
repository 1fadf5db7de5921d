"""Evaluations during a run, and comparisons of finished runs."""
