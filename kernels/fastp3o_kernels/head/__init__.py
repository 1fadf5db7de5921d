"""Hidden states and a head -> the log-probability of each label, losses and gradients, never all
logits at once.
"""
