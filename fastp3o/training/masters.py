"""fp32 masters of weights in half precision, for a model that one process has whole. A sharded one's parts are fp32."""

import torch
from torch import nn


class Masters:
    """Copies in fp32 of what trains, from before it is rounded; everything else is rounded for good.

    Each gradient is added to its copy's as soon as it is there, in fp32, and freed.

    device: of the copies, to which the model goes afterwards.

    parameters: by their names in the model.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype, device: torch.device):
        self.rounded = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        self.parameters = {
            name: nn.Parameter(parameter.detach().to(device, torch.float32, copy=True))
            for name, parameter in self.rounded.items()
        }
        # Before the model goes to the device, which the fp32 weights of what is frozen need not fit. Buffers stay as
        # they are: rounded rotary frequencies would move every position.
        for parameter in model.parameters():
            parameter.data = parameter.data.to(dtype)
        for name, parameter in self.rounded.items():
            master = self.parameters[name]
            parameter.register_post_accumulate_grad_hook(lambda trained, master=master: add_gradient(trained, master))

    @torch.no_grad()
    def round(self) -> None:
        """The weights again, from masters that have moved."""
        torch._foreach_copy_([*self.rounded.values()], [*self.parameters.values()])


def add_gradient(trained: torch.Tensor, master: torch.Tensor) -> None:
    """Adds the gradient of a half-precision parameter, which must have one, to its master's, and frees it."""
    assert trained.grad is not None
    gradient = trained.grad.float()
    master.grad = gradient if master.grad is None else master.grad.add_(gradient)
    trained.grad = None
