"""torch.compile of models that call the losses. N tokens."""

import pytest
import torch
from torch import nn
from torch._dynamo.exc import Unsupported
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode

import fastp3o_kernels as kernels
from tests.kernels.exposed_heads import SIZES, tiny_causal_lm

KNOWN = [torch.zeros(2, 2), torch.zeros(2, 2), torch.tensor([[1.0, 0.0], [0.0, 2.0]])]


def squares(groups: kernels.Groups) -> torch.Tensor:
    return groups.logprobs.square().sum()


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 30, bias=False)

    def forward(self, inputs, labels, offsets):
        hidden, weight = self.body(inputs).relu(), self.head.weight
        return (
            kernels.linear_p3o_loss(hidden, weight, labels, offsets, *KNOWN).loss
            + 2 * kernels.linear_loss(hidden, weight, labels, offsets, squares).loss
            + 3 * kernels.linear_logprobs(hidden, weight, labels).sum()
            + 4 * kernels.logits_p3o_loss(hidden @ weight.T, labels, offsets, *KNOWN).loss
            + 5 * kernels.token_p3o_loss(hidden.mean(1), offsets, *KNOWN).loss
            + 6 * kernels.p3o_loss(hidden[:2, :2], *KNOWN).loss
            + 7 * kernels.token_logprobs(hidden @ weight.T, labels).sum()
            + 8 * kernels.sequence_logprobs(hidden.mean(1), offsets).sum()
        )


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    counters.clear()


def test_one_graph_break_of_each_function_and_no_compilation_at_new_shapes():
    model = Model()
    compiled = torch.compile(model, backend="eager", dynamic=True)
    for N in (11, 7, 12):
        inputs = torch.randn(N, 8), torch.arange(N), torch.tensor([0, 1, 2, 3, N])
        with torch.compiler.set_stance("default" if N == 11 else "fail_on_recompile"):
            loss = compiled(*inputs)
        got = torch.autograd.grad(loss, list(model.parameters()))
        expected = torch.autograd.grad(model(*inputs), list(model.parameters()))
        torch.testing.assert_close(got, expected)
    assert sum(counters["graph_break"].values()) == 8


def test_an_exposed_head_breaks_once_whatever_function_it_is_given():
    model = kernels.expose_head(tiny_causal_lm("llama"))
    compiled = torch.compile(model, backend="eager", dynamic=True)
    for P, T in ((4, 9), (3, 7), (5, 12)):
        ids = torch.randint(3, SIZES["vocab_size"], (P, T))

        def head_loss(hidden, head, ids=ids):
            return kernels.linear_logprobs(
                hidden[:, :-1].flatten(0, 1), head, ids[:, 1:].flatten()
            ).sum()

        with torch.compiler.set_stance("default" if P == 4 else "fail_on_recompile"):
            loss = compiled(ids, use_cache=False, head_loss=head_loss)
        torch.testing.assert_close(loss, model(ids, use_cache=False, head_loss=head_loss))
        loss.backward()
    assert sum(counters["graph_break"].values()) == 1


class Loss(nn.Module):
    def forward(self, *given):
        return (
            kernels.linear_logprobs(*given).sum()
            + kernels.linear_p3o_loss(*given, [0, 1, 2, 3, 11], *KNOWN).loss
        )


@pytest.mark.parametrize(
    "traced",
    [
        lambda *inputs: torch.compile(Loss(), backend="eager", fullgraph=True)(*inputs),
        lambda *inputs: torch.export.export(Loss(), inputs),
        lambda *inputs: Loss()(*map(FakeTensorMode().from_tensor, inputs)),
    ],
)
def test_what_cannot_be_traced_says_where_to_call_it(traced):
    with pytest.raises(
        (RuntimeError, Unsupported),
        match=r"outside of fullgraph=True, torch.export and fake tensors",
    ):
        traced(torch.randn(11, 8), torch.randn(30, 8), torch.arange(11))
