"""fastp3o: a trainer for Pairwise Proximal Policy Optimization (P3O, arXiv 2310.00212)."""
