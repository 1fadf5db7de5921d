"""The heads that are measured, and the numbers of tokens N."""

import os
import re
from typing import NamedTuple

import torch


class HeadSizes(NamedTuple):
    hidden: int
    vocabulary: int

    def __str__(self) -> str:
        return f"D{self.hidden}-V{self.vocabulary}"


CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
# Tries the suite itself on a GPU, or on one that is pretended, whose kernels an interpreter runs.
TRIAL = CUDA and os.environ.get("FASTP3O_TRIAL") == "1"
LARGE = CUDA and not TRIAL

# Llama 3 8B, Qwen 2.5 7B, Gemma 2 2B, and the largest in use; others that are small enough to wait
# for on a CPU.
LARGE_HEADS = [
    HeadSizes(4096, 128256),
    HeadSizes(3584, 152064),
    HeadSizes(2304, 256000),
    HeadSizes(3584, 262144),
]
SMALL_HEADS = [
    HeadSizes(256, 8192),
    HeadSizes(256, 16384),
    HeadSizes(256, 50304),
    HeadSizes(1024, 4096),
]
HEADS = LARGE_HEADS if LARGE else [HeadSizes(32, 203)] if TRIAL else SMALL_HEADS
# The most interesting come first: a run that ends early has measured them.
TOKENS = [8192, 32768, 2048] if LARGE else [32] if TRIAL else [512, 2048]
# On a GPU P3O trains in fp16 unless told otherwise; peers are made for bf16.
DTYPES = [torch.bfloat16, torch.float16] if CUDA else [torch.float32, torch.bfloat16]
DTYPE = DTYPES[0]
RESPONSE_TOKENS = 8 if TRIAL else 128


def typed(value: object) -> str:
    """A parameter as a part of a test's id, which `-k` takes: letters, digits, dots, hyphens and
    underscores.
    """
    if isinstance(value, tuple) and not isinstance(value, HeadSizes):
        return "-".join(map(typed, value))
    return re.sub(r"[^\w.-]+", "_", str(value)).strip("_")


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
