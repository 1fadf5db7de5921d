"""Time and memory of the logits-level P3O loss, forward and backward: Triton against eager PyTorch and torch.compile.

    python benchmarks/logits_level.py --output results.json

On a CPU only eager runs, at a small size. GB/s counts the least traffic: the logits read twice and written once.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import triton
from torch import Tensor

from fastp3o_kernels import logits_p3o_loss
from fastp3o_kernels.eager import sequence_logprobs
from fastp3o_kernels.pair_loss import p3o_loss

SHAPES_GPU = [(8192, 128256), (8192, 152064), (8192, 256000)]
SHAPES_CPU = [(256, 8192)]
RESPONSE_TOKENS = 128


def inputs(rows: int, vocabulary: int, device: str) -> tuple[Tensor, ...]:
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    logits = torch.empty(rows, vocabulary, dtype=dtype, device=device).normal_(std=4).requires_grad_()
    labels = torch.randint(vocabulary, (rows,), device=device)
    cu_seqlens = torch.arange(0, rows + 1, RESPONSE_TOKENS, dtype=torch.int32, device=device)
    pairs = (len(cu_seqlens) - 1) // 2
    with torch.no_grad():
        sums = eager_sums(logits, labels, cu_seqlens)
    old, ref = sums + 0.1 * torch.randn(pairs, 2, device=device), sums + torch.randn(pairs, 2, device=device)
    return logits, labels, cu_seqlens, old, ref, torch.randn(pairs, 2, device=device)


def eager_sums(logits: Tensor, labels: Tensor, cu_seqlens: Tensor) -> Tensor:
    logprobs = logits.float().log_softmax(-1).gather(1, labels[:, None]).squeeze(1)
    return sequence_logprobs(logprobs, cu_seqlens).view(-1, 2)


def eager_loss(logits: Tensor, labels: Tensor, cu_seqlens: Tensor, *pairs: Tensor) -> Tensor:
    return p3o_loss(eager_sums(logits, labels, cu_seqlens), *pairs, impl="eager").loss


def triton_loss(*arguments: Tensor) -> Tensor:
    return logits_p3o_loss(*arguments, impl="triton").loss


def measure(loss_of: Callable[..., Tensor], arguments: tuple[Tensor, ...], repeats: int) -> dict[str, float]:
    """Median milliseconds of forward + backward, and gigabytes allocated beyond inputs and the gradient."""
    logits, device = arguments[0], arguments[0].device.type
    times = []
    for number in range(repeats + 2):
        logits.grad = None
        if device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        start = time.perf_counter()
        loss_of(*arguments).backward()
        if device == "cuda":
            torch.cuda.synchronize()
        if number >= 2:
            times.append(1e3 * (time.perf_counter() - start))
    size = logits.numel() * logits.element_size()
    result = {"ms": statistics.median(times), "gb_per_s": 3 * size / statistics.median(times) / 1e6}
    if device == "cuda":
        result["extra_gb"] = (torch.cuda.max_memory_allocated() - before - size) / 1e9
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="JSON to write.")
    parser.add_argument("--repeats", type=int, default=10)
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    losses: dict[str, Callable[..., Tensor]] = {"eager": eager_loss}
    if device == "cuda":
        losses |= {"torch.compile": torch.compile(eager_loss), "fastp3o": triton_loss}
    results = []
    for rows, vocabulary in SHAPES_GPU if device == "cuda" else SHAPES_CPU:
        given = inputs(rows, vocabulary, device)
        for name, loss_of in losses.items():
            result = {"implementation": name, "N": rows, "V": vocabulary, **measure(loss_of, given, arguments.repeats)}
            results.append(result)
            print("  ".join(f"{k} {v:.3g}" if isinstance(v, float) else f"{k} {v}" for k, v in result.items()))
        del given
    record = {
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "torch": torch.__version__,
        "triton": triton.__version__,
        "results": results,
    }
    if arguments.output:
        arguments.output.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
