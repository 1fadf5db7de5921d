"""fastp3o: a trainer for Pairwise Proximal Policy Optimization (P3O, arXiv 2310.00212)."""

from fastp3o_kernels import __version__ as __version__
