"""Responses sampled from the policy."""
