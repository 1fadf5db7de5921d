"""Layers cut over the processes of a tensor group, with torch's tensor parallelism and the family's
own plan.

Each process has some of every layer's heads and neurons, and some rows of the embeddings and of the
head. All of a group compute the same tokens, and add up what each of them has found, twice a layer.
Whatever is not in the plan, such as norms, is whole on each, with the same values and gradients.
"""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from fastp3o.errors import UserError
from fastp3o.models.packed_model import PackedModel
from fastp3o_kernels import VocabularyShard

# What transformers' plans call a way to cut a module, and the dimension of its weight that is cut.
STYLES: dict[str, tuple[Callable[[], Any], int | None]] = {
    "colwise": (ColwiseParallel, 0),
    "colwise_gather_output": (partial(ColwiseParallel, output_layouts=Replicate()), 0),
    "rowwise": (RowwiseParallel, 1),
    "rowwise_split_input": (partial(RowwiseParallel, input_layouts=Replicate()), 1),
    # Norms of single heads: each process has the gradient from its own heads, a part of the sum.
    "replicated_with_grad_allreduce": (
        partial(SequenceParallel, sequence_dim=2, use_local_output=True),
        None,
    ),
}


def cut(model: PackedModel, mesh: DeviceMesh) -> None:
    """Cuts a model over the processes of a one-dimensional mesh, in place; the model may be on the
    meta device. Raises UserError if the family has no plan or one that is not of `STYLES`, and for
    sizes that do not divide, except the vocabulary's.
    """
    config, size = model.model.config.get_text_config(), mesh.size()
    refused = f"--tensor_parallel {size} cannot cut {type(model.model).__name__}: "
    for name in ("num_attention_heads", "num_key_value_heads"):
        if (heads := getattr(config, name, None) or size) % size:
            raise UserError(f"{refused}it has {heads} {name}, which {size} does not divide")
    if any(isinstance(part, nn.Dropout) and part.p for part in model.modules()):
        raise UserError(f"{refused}dropout would be another in each process")
    if model.compiled:
        raise UserError(
            f"{refused}torch does not compile cut layers, and --compile_layers asks for it"
        )
    body, embeddings = model.model.base_model, model.model.get_input_embeddings()
    planned: dict[str, str] = getattr(config, "base_model_tp_plan", None) or {}
    kinds: dict[str, tuple[Any, str]] = {
        name: (part, planned[general])
        for name, part in [*body.named_modules(), *body.named_parameters()]
        if (general := re.sub(r"\.\d+(?=\.|$)", ".*", name)) in planned and part is not embeddings
    }
    if not kinds:
        raise UserError(f"{refused}transformers has no plan for {config.model_type}")
    for name, (part, kind) in kinds.items():
        if kind not in STYLES or isinstance(part, nn.Parameter):
            raise UserError(f"{refused}its plan has {kind} for {name}")
        style, dim = STYLES[kind]
        if dim is not None and part.weight.shape[dim] % size:
            raise UserError(
                f"{refused}the {part.weight.shape[dim]} of {name}, which {size} does not divide"
            )
        trains = next(part.parameters()).requires_grad
        parts = [part]
        if hasattr(part, "base_layer"):  # an adapter's other matrix is whole
            parts = [part.base_layer, *(part.lora_A if dim else part.lora_B).values()]
        for one in parts:
            parallelize_module(one, mesh, style())
        if dim is None:  # torch takes it that norms train
            part.requires_grad_(trains)
    cut_vocabulary(model, mesh)
    model.cut_over = mesh


def cut_vocabulary(model: PackedModel, mesh: DeviceMesh) -> None:
    """Gives each process some rows of the embeddings and, for a causal LM, of the head. Tied
    weights stay tied.
    """
    embeddings: Any = model.model.get_input_embeddings()
    uncut = embeddings.weight
    parallelize_module(embeddings, mesh, RowwiseParallel(input_layouts=Replicate()))
    if hasattr(model.model, "score"):
        return
    head: Any = model.model.get_output_embeddings()
    for name, parameter in head.named_parameters():
        # A bias is whole: torch cannot cut it once more, over the shards, where parts are uneven.
        part = distribute_tensor(parameter, mesh, [Shard(0) if name == "weight" else Replicate()])
        own = (
            embeddings.weight if parameter is uncut else nn.Parameter(part, parameter.requires_grad)
        )
        head.register_parameter(name, own)
    model.shard = VocabularyShard.of(head.weight)
