"""Log-probabilities of the responses to each prompt -> P3O's loss (arXiv 2310.00212) and its
gradients.
"""
