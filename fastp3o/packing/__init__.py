"""Groups of a prompt and its responses -> packed rows: one [1, T] input, nothing padded, a shared prompt once.

packed_row.py   what a packed row is: tokens, positions, attention segments, scored tokens
layout.py       one row from the groups in it, token by token
pack.py         which groups share a row, and values of rows back in the order of the groups
"""
