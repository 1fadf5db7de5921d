"""Decoding of one token a step: attention over cached keys and values, and sampling of the next token.

cache.py              keys and values of a layer, and what the slots of a step work on
attention.py          public: decode_attention
in_torch.py           it in PyTorch
attention_kernel.py   it in Triton: chunks of keys
merge_kernel.py       Triton: the chunks' results
noise.py              random numbers that are a function of (seed, prompt, response, position)
sampling.py           public: sample_tokens
sampling_kernel.py    Triton: from the whole vocabulary at temperature 1
"""

from fastp3o_kernels.decoding.attention import decode_attention
from fastp3o_kernels.decoding.cache import LayerCache, Slots
from fastp3o_kernels.decoding.noise import response_keys
from fastp3o_kernels.decoding.sampling import sample_tokens

__all__ = ["LayerCache", "Slots", "decode_attention", "response_keys", "sample_tokens"]
