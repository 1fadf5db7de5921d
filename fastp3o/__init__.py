"""fastp3o: a trainer for Pairwise Proximal Policy Optimization (P3O, arXiv 2310.00212)."""

# That of fastp3o_kernels, whose import takes torch's seconds; a test compares them.
__version__ = "0.1.0"
