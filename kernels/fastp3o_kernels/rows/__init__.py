"""Rows of logits, one a token -> the log-probability of each label and of each sequence, and their
gradients.
"""
