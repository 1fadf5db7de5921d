"""Rewards of responses, less penalties."""
