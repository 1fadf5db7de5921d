"""Error of the log-ratio of a 128-token response: fp32 logits of bf16 operands, and logits rounded to bf16.

512 tokens sampled from a policy whose logits have a standard deviation of 8, and the head's weight moved by noise of
1e-4, as a small optimizer step does. D 512, V 16000.
"""

import torch
from torch import Tensor

from benchmarks.implementations import eager_logprobs
from benchmarks.shapes import DEVICE, TRIAL
from fastp3o_kernels import linear_logprobs

N, D, V, TOKENS = (32, 32, 203, 8) if TRIAL else (512, 512, 16000, 128)


def test_log_ratio_of_fastp3o(benchmark):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(N, D, generator=generator)
    weight = (8 / D**0.5) * torch.randn(V, D, generator=generator)
    moved = weight + 1e-4 * torch.randn(V, D, generator=generator)
    hidden, weight, moved = (tensor.bfloat16().to(DEVICE) for tensor in (hidden, weight, moved))
    probabilities = (hidden.float() @ weight.float().T).softmax(-1).cpu()
    labels = torch.multinomial(probabilities, 1, generator=generator).squeeze(1).to(DEVICE)

    def rounded(weight: Tensor) -> Tensor:
        return eager_logprobs((hidden.float() @ weight.float().T).bfloat16(), labels)

    def exact(weight: Tensor) -> Tensor:
        return eager_logprobs(hidden.double() @ weight.double().T, labels)

    def fp32(weight: Tensor) -> Tensor:
        return linear_logprobs(hidden, weight, labels)

    def log_ratios(logprobs) -> Tensor:
        return (logprobs(moved).double() - logprobs(weight).double()).view(-1, TOKENS).sum(1)

    expected = log_ratios(exact)
    benchmark.pedantic(lambda: fp32(weight), rounds=3)
    benchmark.extra_info |= {
        "level": "precision",
        "implementation": "fastp3o",
        "N": N,
        "D": D,
        "V": V,
        "log_ratio_error": (log_ratios(fp32) - expected).abs().max().item(),
        "log_ratio_error_of_bf16_logits": (log_ratios(rounded) - expected).abs().max().item(),
    }
