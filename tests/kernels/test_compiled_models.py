"""torch.compile of models that call the losses. N tokens."""

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from fastp3o_kernels import (
    Groups,
    expose_head,
    linear_logprobs,
    linear_loss,
    linear_p3o_loss,
    logits_p3o_loss,
    p3o_loss,
    sequence_logprobs,
    token_logprobs,
    token_p3o_loss,
)
from tests.kernels.exposed_heads import SIZES, tiny_causal_lm

KNOWN = [torch.zeros(2, 2), torch.zeros(2, 2), torch.tensor([[1.0, 0.0], [0.0, 2.0]])]


def squares(groups: Groups) -> torch.Tensor:
    return groups.logprobs.square().sum()


# The arguments of each function, from hidden states [N, 8], a weight [V, 8], labels [N] and offsets [5].
ARGUMENTS = {
    linear_p3o_loss: lambda hidden, weight, labels, offsets: (hidden, weight, labels, offsets, *KNOWN),
    linear_loss: lambda hidden, weight, labels, offsets: (hidden, weight, labels, offsets, squares),
    linear_logprobs: lambda hidden, weight, labels, offsets: (hidden, weight, labels),
    logits_p3o_loss: lambda hidden, weight, labels, offsets: (hidden @ weight.T, labels, offsets, *KNOWN),
    token_p3o_loss: lambda hidden, weight, labels, offsets: (hidden.mean(1), offsets, *KNOWN),
    p3o_loss: lambda hidden, weight, labels, offsets: (hidden[:2, :2], *KNOWN),
    token_logprobs: lambda hidden, weight, labels, offsets: (hidden @ weight.T, labels),
    sequence_logprobs: lambda hidden, weight, labels, offsets: (hidden.mean(1), offsets),
}


class Model(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 30, bias=False)
        self.function, self.arguments = function, ARGUMENTS[function]

    def forward(self, inputs, labels, offsets):
        output = self.function(*self.arguments(self.body(inputs).relu(), self.head.weight, labels, offsets))
        return 2 * (output if isinstance(output, torch.Tensor) else output.loss).sum()


def batch(N):
    return torch.randn(N, 8), torch.arange(N), torch.tensor([0, 1, 2, 3, N])


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    counters.clear()


@pytest.mark.parametrize("function", ARGUMENTS)
def test_one_graph_break_and_no_compilation_at_new_shapes(function):
    model = Model(function)
    compiled = torch.compile(model, backend="eager", dynamic=True)
    for N in (11, 7, 12):
        inputs = batch(N)
        with torch.compiler.set_stance("default" if N == 11 else "fail_on_recompile"):
            loss = compiled(*inputs)
        got = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
        expected = torch.autograd.grad(model(*inputs), list(model.parameters()), allow_unused=True)
        torch.testing.assert_close(got, expected)
    assert list(counters["graph_break"].values()) == [1]
    assert counters["stats"]["unique_graphs"] == 2  # before the call, and after it


def test_an_exposed_head_breaks_once_whatever_function_it_is_given():
    model = expose_head(tiny_causal_lm("llama"))
    compiled = torch.compile(model, backend="eager", dynamic=True)
    for P, T in ((4, 9), (3, 7), (5, 12)):
        ids = torch.randint(3, SIZES["vocab_size"], (P, T))

        def head_loss(hidden, head, ids=ids):
            return linear_logprobs(hidden[:, :-1].flatten(0, 1), head, ids[:, 1:].flatten()).sum()

        with torch.compiler.set_stance("default" if P == 4 else "fail_on_recompile"):
            loss = compiled(ids, use_cache=False, head_loss=head_loss)
        torch.testing.assert_close(loss, model(ids, use_cache=False, head_loss=head_loss))
        loss.backward()
    assert sum(counters["graph_break"].values()) == 1
