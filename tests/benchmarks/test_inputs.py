import torch

from benchmarks import inputs as module
from benchmarks.implementations import p3o_of
from benchmarks.shapes import RESPONSE_TOKENS, HeadSizes
from benchmarks.test_logits_level import Logits
from fastp3o_kernels import linear_logprobs, token_logprobs

HEAD = HeadSizes(64, 1003)


def pairs_without_gradient(logprobs, inputs):
    logprobs = logprobs.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(p3o_of(logprobs, inputs), logprobs)
    return int((gradient.view(-1, 2 * RESPONSE_TOKENS) == 0).all(1).sum())


def test_no_pair_is_clipped_at_either_level(monkeypatch):
    monkeypatch.setattr(module, "DTYPE", torch.bfloat16)
    inputs = module.random_inputs(HEAD, 4096)
    assert pairs_without_gradient(linear_logprobs(inputs.hidden, inputs.weight, inputs.labels), inputs) == 0
    logits = Logits(inputs)
    logprobs = token_logprobs(logits.source, inputs.labels)
    # Rounded logits would clip some, were they not taken for the policy's own.
    assert pairs_without_gradient(logprobs, inputs) > 0
    assert pairs_without_gradient(logprobs, logits.inputs) == 0
