"""Groups of a prompt and its responses -> packed rows: one [1, T] input, nothing padded, a shared
prompt once.
"""
