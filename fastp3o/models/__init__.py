"""Hugging Face models over packed rows: loading, attention, sharding, the reference, and which
parameters train.
"""
