"""Decoding of one token a step: attention over cached keys and values, and sampling of the next
token.
"""

from fastp3o_kernels.decoding.attention import decode_attention
from fastp3o_kernels.decoding.batch import Batch, Working
from fastp3o_kernels.decoding.cache import LayerCache, Slots
from fastp3o_kernels.decoding.sampling import race_numbers, response_keys, sample_tokens
from fastp3o_kernels.decoding.take import take_tokens

__all__ = [
    "Batch",
    "LayerCache",
    "Slots",
    "Working",
    "decode_attention",
    "race_numbers",
    "response_keys",
    "sample_tokens",
    "take_tokens",
]
