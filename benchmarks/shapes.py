"""The heads that are measured, and the numbers of tokens N."""

from typing import NamedTuple

import torch


class HeadSizes(NamedTuple):
    hidden: int
    vocabulary: int


CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")

# Llama 3 8B, Qwen 2.5 7B, Gemma 2 2B, and the largest in use; on a CPU one small enough to wait for.
HEADS = (
    [HeadSizes(4096, 128256), HeadSizes(3584, 152064), HeadSizes(2304, 256000), HeadSizes(3584, 262144)]
    if CUDA
    else [HeadSizes(256, 8192)]
)
# The most interesting come first: a run that ends early has measured them.
TOKENS = [8192, 32768, 2048] if CUDA else [512, 2048]
DTYPE = torch.bfloat16 if CUDA else torch.float32
RESPONSE_TOKENS = 128
