"""Losses outside of the forward call of a model that FSDP2 spreads over two processes, each of
which runs this file, against one process.
"""

from collections.abc import Callable
from itertools import product
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from fastp3o_kernels import (
    Head,
    linear_distillation,
    linear_logprobs,
    linear_loss,
    linear_p3o_loss,
)
from tests.fastp3o.together import together

P, TOKENS, WIDTH, VOCABULARY = 4, 3, 8, 12  # each of 2 P responses has so many tokens
N = 2 * P * TOKENS


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.norm = nn.RMSNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.norm(self.body(inputs))


def everything(model: Model) -> None:
    pass


def head_alone(model: Model) -> None:
    model.requires_grad_(False)
    model.lm_head.requires_grad_(True)


def bias_alone(model: Model) -> None:
    model.requires_grad_(False)
    model.lm_head.bias.requires_grad_(True)


def in_root(model: Model) -> None:
    fully_shard(model.body)
    fully_shard(model)


def in_its_own_group(model: Model) -> None:
    fully_shard(model.lm_head)
    in_root(model)


def with_the_norm(model: Model) -> None:
    fully_shard([model.norm, model.lm_head])
    in_root(model)


def without_a_root(model: Model) -> None:
    for part in (model.body, model.norm, model.lm_head):
        fully_shard(part)


def layer(head: nn.Linear) -> nn.Linear:
    return head


def cast_weight(head: nn.Linear) -> Head:
    getattr(head, "unshard", lambda: None)()
    return Head(head.weight.double().float(), bias=head.bias, temperature=2.0)


def mean(pairs) -> Tensor:
    return pairs.logprobs.sum()


# Each with the mean over prompts.
Loss = Callable[[Tensor, nn.Linear | Head, Tensor], Tensor]
LOSSES: dict[str, Loss] = {
    "p3o": lambda hidden, head, labels: (
        linear_p3o_loss(hidden, head, labels, offsets(labels), None, *tables(labels)).loss
    ),
    "loss": lambda hidden, head, labels: (
        linear_loss(hidden, head, labels, offsets(labels), mean, responses_per_group=2).loss
    ),
    "log-probs": lambda hidden, head, labels: linear_logprobs(hidden, head, labels).mean(),
    "distillation": lambda hidden, head, labels: linear_distillation(
        hidden, head, torch.ones(len(labels), 5), torch.linspace(-1, 1, 60).view(12, 5)
    ).mean(),
}


def offsets(labels: Tensor) -> list[int]:
    return [*range(0, len(labels) + 1, TOKENS)]


def tables(labels: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probs of a reference, and rewards that are those of the same responses in any share."""
    sums = labels.view(-1, 2, TOKENS).float().sum(2)
    return torch.full_like(sums, -7.0), sums


def gradients(model: Model, loss: Loss, head_of: Callable, share: slice) -> dict[str, Tensor]:
    """After two backward passes, each of another half of the share."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(N, WIDTH, generator=generator)[share]
    labels = torch.randint(0, VOCABULARY, (N,), generator=generator)[share]
    half = len(labels) // 2
    for part in (slice(0, half), slice(half, None)):
        loss(model(inputs[part]), head_of(model.lm_head), labels[part]).backward()
    found = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
    return {
        name: grad.full_tensor() if isinstance(grad, DTensor) else grad
        for name, grad in found.items()
    }


def model_with(trains: Callable[[Model], None]) -> Model:
    torch.manual_seed(0)
    model = Model()
    trains(model)
    return model


def test_gradients_of_a_loss_outside_of_the_forward_call_are_those_of_one_process():
    done = together(Path(__file__))
    assert done.returncode == 0, done.stdout


def check(trains: Callable, spread: Callable, loss: Loss, head_of: Callable) -> None:
    expected = gradients(model_with(trains), loss, head_of, slice(0, N))
    model = model_with(trains)
    spread(model)
    parameters = dict(model.named_parameters())  # those that an optimizer has
    share = slice(dist.get_rank() * N // 2, (dist.get_rank() + 1) * N // 2)
    found = gradients(model, loss, head_of, share)
    case = f"{trains.__name__}, {spread.__name__}, {head_of.__name__}"
    assert found.keys() == expected.keys(), case
    for name, gradient in expected.items():
        assert gradient.any(), (case, name)
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6, msg=case)
        assert parameters[name].grad is not None, (case, name)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    groups = [in_root, in_its_own_group, with_the_norm, without_a_root]
    trained = [everything, head_alone, bias_alone]
    for case in product(trained, groups, LOSSES.values(), [layer, cast_weight]):
        check(*case)
    dist.destroy_process_group()
