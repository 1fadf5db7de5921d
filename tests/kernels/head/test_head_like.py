"""What losses take for a head: a Head, a linear layer, a bare weight, and nothing else."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from fastp3o_kernels import (
    Groups,
    Head,
    TokenOutputs,
    linear_logprobs,
    linear_loss,
    linear_p3o_loss,
    sequence_logprobs,
)

N, D, V = 12, 8, 20
OFFSETS = [0, 3, 6, 8, 12]
REWARDS = torch.tensor([[1.0, 0.0], [0.5, -0.5]])


def logprobs(hidden: Tensor, head: object, labels: Tensor) -> Tensor:
    return linear_logprobs(hidden, head, labels).sum()


def objective(hidden: Tensor, head: object, labels: Tensor) -> Tensor:
    def loss(groups: Groups) -> Tensor:
        return (groups.logprobs * groups["rewards"]).sum()

    tensors = {"rewards": REWARDS}
    return linear_loss(
        hidden, head, labels, OFFSETS, loss, responses_per_group=2, response_tensors=tensors
    ).loss


def p3o(hidden: Tensor, head: object, labels: Tensor) -> Tensor:
    whole = Head.from_layer(head).detach()
    old = sequence_logprobs(linear_logprobs(hidden.detach(), whole, labels), OFFSETS).view(2, 2)
    return linear_p3o_loss(hidden, head, labels, OFFSETS, old, old, REWARDS).loss


LOSSES: list[Callable] = [logprobs, objective, p3o]


def inputs() -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(0)
    return torch.randn(N, D, generator=made, requires_grad=True), torch.randint(
        V, (N,), generator=made
    )


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.__name__)
@pytest.mark.parametrize("bias", [False, True])
def test_a_linear_layer_is_its_weight_and_bias(loss, bias):
    torch.manual_seed(0)
    layer = nn.Linear(D, V, bias=bias)
    results = []
    for head in (layer, Head(layer.weight, bias=layer.bias)):
        hidden, labels = inputs()
        value = loss(hidden, head, labels)
        results.append([value, *torch.autograd.grad(value, [hidden, *layer.parameters()])])
    for got, expected in zip(*results, strict=True):
        assert torch.equal(got, expected)


class Adapted(nn.Module):
    """Like a layer with adapters: it has a weight, which is not all of it."""

    def __init__(self) -> None:
        super().__init__()
        self.base_layer = nn.Linear(D, V)

    @property
    def weight(self) -> Tensor:
        return self.base_layer.weight


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.__name__)
@pytest.mark.parametrize(
    "head", [Adapted(), [[1.0] * D] * V, None], ids=["adapted", "list", "None"]
)
def test_what_is_no_head_is_refused_by_its_type(loss, head):
    hidden, labels = inputs()
    with pytest.raises(
        ValueError, match=rf"a linear layer or a weight .*got {type(head).__name__}"
    ):
        loss(hidden, head, labels)


def test_an_objective_that_asks_for_a_tensor_nobody_gave_is_told_which_there_are():
    hidden, labels = inputs()
    head = nn.Linear(D, V)
    with pytest.raises(KeyError, match=r"no tensor 'reward' .*given: rewards"):
        linear_loss(
            hidden,
            head,
            labels,
            OFFSETS,
            lambda groups: groups["reward"].sum(),
            responses_per_group=2,
            response_tensors={"rewards": REWARDS},
        )
    with pytest.raises(ValueError, match="responses_per_group=1"):
        linear_loss(
            hidden,
            head,
            labels,
            OFFSETS,
            lambda groups: groups.logprobs.sum(),
            response_tensors={"r": REWARDS},
        )


def test_outputs_say_what_comes_back():
    """As the types say: a tensor without outputs, and TokenOutputs with them, of none, too."""
    hidden, labels = inputs()
    assert isinstance(linear_logprobs(hidden, nn.Linear(D, V), labels), Tensor)
    assert isinstance(linear_logprobs(hidden, nn.Linear(D, V), labels, outputs=()), TokenOutputs)
