"""Optimizer steps: AdamW on fp32 weights, and which steps move nothing."""
