"""The layers of a model over packed rows, compiled by torch: norms, rotary positions, gates and residuals, which cost
a pass over memory each, become few kernels, forward and backward.

Layers of a kind share what is compiled, for rows of any length. Attention stays an operation of its own. What comes
without packed rows (rollouts, `generate`) runs uncompiled. Weights keep their names and places, so saving, FSDP2, LoRA
and copies of a model do not notice; FSDP2's hooks are around what is compiled, gradient checkpointing is in it.
"""

from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only
from transformers.utils.logging import get_logger

from fastp3o.models.one_by_one import FlatSegments

logger = get_logger(__name__)

# Gemma with LoRA takes ten: of three kinds with adapters and of two without, for rows with shared prompts and others.
VERSIONS = 32


def compile_layers(layers: nn.ModuleList, embeddings: nn.Module) -> None:
    """Compiles the layers in place, at their first packed row. If that fails, they run uncompiled, after one warning.

    embeddings: those that the first layer follows.
    """
    compiled = Compiled()
    for number, layer in enumerate(layers):
        # An attribute, unlike torch's `Module.compile`, leaves hooks as they are.
        vars(layer)["forward"] = CompiledForward(layer, compiled, None if number else embeddings)


class Compiled:
    """The function that layers of one model share.

    fails: whether they run uncompiled, since compiling failed.
    """

    def __init__(self) -> None:
        self.fails = False
        # torch keeps so many versions of a code object at most, one for each kind of layer and of row. A model has an
        # object of its own.
        torch._dynamo.config.recompile_limit = max(VERSIONS, torch._dynamo.config.recompile_limit)
        own = FunctionType(uncompiled.__code__.replace(), uncompiled.__globals__)
        self.run: Callable[..., Any] = torch.compile(own, fullgraph=True, dynamic=True)

    def __call__(self, layer: nn.Module, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        mark_lengths(hidden.shape[1], (hidden, args, kwargs))
        return self.run(layer, hidden, *args, **kwargs)

    def fail(self, error: Exception) -> None:
        self.fails = True
        logger.warning(f"layers run uncompiled: compiling them failed with: {error}")


def uncompiled(layer, *args, **kwargs):
    return type(layer).forward(layer, *args, **kwargs)


class CompiledForward:
    """A layer's `forward`. Copies of the layer have a copy of it, which runs theirs."""

    def __init__(self, layer: nn.Module, compiled: Compiled, embeddings: nn.Module | None):
        """embeddings: given to the first layer only."""
        self.layer, self.compiled, self.embeddings = layer, compiled, embeddings
        self.tried = False

    def __call__(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        packed = isinstance(kwargs.get("segments"), FlatSegments) and "cache" not in kwargs
        if not packed or self.compiled.fails:
            return uncompiled(self.layer, hidden, *args, **kwargs)
        if torch.is_grad_enabled():
            return self.run(hidden, args, kwargs)
        # What is compiled for training rounds otherwise than what is compiled for a mere forward pass, and ratios to
        # old log-probs would not begin at one.
        trains = self.embeddings is not None and any(weight.requires_grad for weight in self.embeddings.parameters())
        if trains and not hidden.requires_grad:
            hidden = hidden.detach().requires_grad_()
        with torch.enable_grad():
            output = self.run(hidden, args, kwargs)
        return tree_map_only(Tensor, lambda part: part.detach().requires_grad_(part.requires_grad), output)

    def run(self, hidden: Tensor, args: tuple, kwargs: dict) -> Any:
        if not self.tried:
            self.tried = True
            self.try_to_compile(hidden, args, kwargs)
        if not self.compiled.fails:
            try:
                return self.compiled(self.layer, hidden, *args, **kwargs)
            except torch._dynamo.exc.TorchDynamoException as error:  # for a kind of row that comes later
                self.compiled.fail(error)
        return uncompiled(self.layer, hidden, *args, **kwargs)

    def try_to_compile(self, hidden: Tensor, args: tuple, kwargs: dict) -> None:
        """Makes both passes once: in a backward pass of the whole model an error could not be undone."""
        logger.warning_once("compiling layers: a minute or so, and seconds once torch has them on disk")
        hidden = hidden.detach().requires_grad_(hidden.requires_grad)
        trained = [tensor for tensor in (hidden, *self.layer.parameters()) if tensor.requires_grad]
        try:
            # Gradient checkpointing around the layer must not count what is saved here.
            with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
                output = self.compiled(self.layer, hidden, *args, **kwargs)
            if trained:
                outputs = [part for part in tree_leaves(output) if isinstance(part, Tensor) and part.requires_grad]
                torch.autograd.grad(outputs, trained, [torch.zeros_like(part) for part in outputs], allow_unused=True)
        except Exception as error:  # whatever a model does that the compiler does not take
            self.compiled.fail(error)


def mark_lengths(tokens: int, inputs: Any) -> None:
    """Tells torch which sizes differ between rows: those of T tokens, and all of segments.

    It would guess from sizes that are equal by chance.
    """
    for tensor in tree_leaves(inputs):
        if isinstance(tensor, Tensor) and tensor.dim():
            dimension = 0 if tensor.dim() == 1 else next((d for d, n in enumerate(tensor.shape) if n == tokens), None)
            if dimension is not None:
                torch._dynamo.maybe_mark_dynamic(tensor, dimension)
