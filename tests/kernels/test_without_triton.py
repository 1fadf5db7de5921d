"""The package needs only torch: without triton all operations run in PyTorch."""

import subprocess
import sys
from pathlib import Path

import fastp3o_kernels

# Run where importing triton fails as if it were not installed.
EVERY_OPERATION = """
import sys

class NoTriton:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "triton":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, NoTriton())
import torch
from fastp3o_kernels import *
from fastp3o_kernels.decoding import *
from fastp3o_kernels.operation import HAS_TRITON

assert not HAS_TRITON
N, V, D = 9, 33, 8
hidden, weight, bias = (torch.randn(*shape, requires_grad=True) for shape in ((N, D), (V, D), (V,)))
logits = torch.randn(N, V, requires_grad=True)
labels, cu_seqlens = torch.arange(N), torch.tensor([0, 2, 3, 6, 9])
head = Head(weight, bias=bias, softcap=5.0, temperature=0.7)
known = [-torch.rand(2, 2) for _ in range(3)]

def check_backward(result, *leaves):
    gradients = torch.autograd.grad(result.sum(), leaves)
    assert all(gradient.isfinite().all() for gradient in gradients), gradients

for impl in (None, "eager"):
    check_backward(token_logprobs(logits, labels, impl=impl), logits)
    check_backward(sequence_logprobs(logits[:, 0], cu_seqlens, impl=impl), logits)
    check_backward(linear_logprobs(hidden, head, labels, memory_budget=3000, impl=impl), hidden, weight, bias)
    check_backward(p3o_loss(logits[:2, :2], *known, impl=impl).loss, logits)
    check_backward(token_p3o_loss(logits[:, 0], cu_seqlens, *known, impl=impl).loss, logits)
    check_backward(logits_p3o_loss(logits, labels, cu_seqlens, *known, impl=impl).loss, logits)
    given = hidden, head, labels, cu_seqlens
    check_backward(linear_p3o_loss(*given, *known, memory_budget=3000, impl=impl).loss, hidden, weight, bias)
    check_backward(linear_loss(*given, lambda groups: groups.logprobs.sum(), impl=impl).loss, hidden, weight, bias)

cache = LayerCache(*(torch.zeros(shape) for shape in 2 * [(1, 1, 3, 8)] + 2 * [(2, 1, 4, 8)]))
slots = Slots(torch.tensor([0, 1]), torch.tensor([3, 0]), torch.tensor([0, 2]), responses_per_prompt=2)
new = torch.randn(2, 1, 8)
assert decode_attention(new.expand(2, 3, 8), new, new, cache, slots, scale=1.0).isfinite().all()
keys = response_keys(0, torch.tensor([0]), 2)[0]
assert (sample_tokens(logits[:2].detach(), keys, slots.steps).tokens < V).all()

try:
    token_logprobs(logits, labels, impl="triton")
except ValueError as error:
    print(error)
assert "triton" not in sys.modules
"""


def test_every_operation_runs_forward_and_backward():
    command = [sys.executable, "-c", EVERY_OPERATION]
    done = subprocess.run(
        command, cwd=Path(fastp3o_kernels.__file__).parents[1], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith('impl="triton" needs the package triton, which is not installed')
