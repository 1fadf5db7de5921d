"""Decoding of one token a step: attention over cached keys and values, and sampling of the next token."""

from fastp3o_kernels.decoding.attention import decode_attention
from fastp3o_kernels.decoding.cache import LayerCache, Slots
from fastp3o_kernels.decoding.sampling import response_keys, sample_tokens

__all__ = ["LayerCache", "Slots", "decode_attention", "response_keys", "sample_tokens"]
