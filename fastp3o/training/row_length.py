"""How long packed rows are on a CPU, whose memory holds less than a GPU's beside what else runs
there.
"""

from collections.abc import Callable
from typing import Literal

from accelerate.utils import gather_object

from fastp3o.models.packed_model import PackedModel
from fastp3o.packing.settings import Packing
from fastp3o.runtime.context import Context
from fastp3o.runtime.host_memory import free_host_memory
from fastp3o.training.predicted_memory import Lengths, Model, update_memory

LEAST = 512


def fitting(context: Context, asked: Packing, bytes_of: Callable[[int], int]) -> Packing:
    """Packs rows of half the length that is asked for, or half of that, and so on, until the
    memory that is free holds an update, or to LEAST. All processes take the shortest.

    bytes_of: memory that an update of rows of so many tokens takes beside the model in memory.
    """
    free, longest = free_host_memory(), asked.tokens_per_row
    tokens = longest
    while tokens > LEAST and bytes_of(tokens) > free:
        tokens //= 2
    if context.accelerator.num_processes > 1:
        tokens = min(gather_object([tokens]))
    if tokens == longest:
        return asked
    context.accelerator.print(
        f"--tokens_per_row: {tokens}, since an update of {longest} takes about "
        f"{bytes_of(longest) / 1e9:.1f} GB more, and {free / 1e9:.1f} are free"
    )
    return asked._replace(tokens_per_row=tokens)


def further_bytes(
    context: Context,
    model: PackedModel,
    tokens: int,
    *,
    trainable_layers: int,
    optimizer: Literal["adamw", "adamw_8bit"],
    checkpointing: bool,
    second_model: bool,
) -> int:
    """Bytes that an update of rows of so many tokens takes beside the model's weights, with those
    of a second model, the reference: at most, as if all tokens had labels and each key were
    gathered twice.

    model: that trains, in memory already. trainable_layers, optimizer, checkpointing: as the
    options say.
    """
    sizes = Model(model, trainable_layers)
    update = update_memory(
        sizes,
        Lengths(tokens, 2 * tokens, tokens),
        context.precision,
        checkpointing=checkpointing,
        optimizer=optimizer,
        kernels=False,
    )
    reference = sizes.parameters * context.precision.weights.itemsize if second_model else 0
    return update.peak + reference - sum(parameter.nbytes for parameter in model.parameters())
