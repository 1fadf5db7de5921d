"""fp32 copies of the trained weights of a model in half precision."""

import torch
from torch import Tensor, nn


class Masters:
    """fp32 copies of the trained weights of a model in half precision, made before these are
    rounded. Everything else is rounded for good. A sharded model needs none: its parts are fp32.

    Each gradient is added in fp32 to its copy's as soon as it is computed, and freed. device: the
    copies', to which the model goes afterwards. parameters: the copies, by their names in the
    model.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype, device: torch.device):
        self.rounded = trained_parameters(model)
        copies = {
            name: weight.detach().to(device, torch.float32, copy=True)
            for name, weight in self.rounded.items()
        }
        self.parameters = {name: nn.Parameter(copied) for name, copied in copies.items()}
        # Before the model goes to the device, where the frozen fp32 weights may not fit. Buffers
        # stay as they are: rounded rotary frequencies would move every position.
        for parameter in model.parameters():
            if parameter.is_floating_point():  # and not quantized
                parameter.data = parameter.data.to(dtype)
        for name, parameter in self.rounded.items():
            master = self.parameters[name]
            parameter.register_post_accumulate_grad_hook(
                lambda trained, master=master: add_gradient(trained, master)
            )

    @torch.no_grad()
    def round(self) -> None:
        """Rounds the masters, which have moved, to the model's weights."""
        torch._foreach_copy_([*self.rounded.values()], [*self.parameters.values()])


def add_gradient(trained: Tensor, master: Tensor) -> None:
    """Adds the gradient of a half-precision parameter, which must have one, to its master's, and
    frees it.
    """
    assert trained.grad is not None
    master.grad = trained.grad.float() if master.grad is None else master.grad.add_(trained.grad)
    trained.grad = None


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    return {
        name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad
    }
