"""How long packed rows are on a CPU, whose memory holds less than a GPU's beside what else runs
there.
"""

from accelerate.utils import gather_object

from fastp3o.config import StageConfig
from fastp3o.models.packed_model import PackedModel
from fastp3o.runtime.context import Context
from fastp3o.runtime.host_memory import free_host_memory
from fastp3o.training.predicted_memory import Lengths, Model, update_memory

LEAST = 512


def fit_rows(context: Context, config: StageConfig, model: PackedModel) -> None:
    """Where rows are on a CPU and nobody has named their length: halves that of `config.packing`
    until the memory that is free holds an update, or to LEAST. All processes take the shortest.
    model: that trains, in memory already.
    """
    if config.tokens_per_row is not None or context.device.type != "cpu":
        return
    free, asked = free_host_memory(), config.packing.tokens_per_row
    fitting = asked
    while fitting > LEAST and further_bytes(context, config, model, fitting) > free:
        fitting //= 2
    if context.accelerator.num_processes > 1:
        fitting = min(gather_object([fitting]))
    if fitting < asked:
        needed = further_bytes(context, config, model, asked)
        context.accelerator.print(
            f"--tokens_per_row: {fitting}, since an update of {asked} takes about {needed / 1e9:.1f} GB more, and "
            f"{free / 1e9:.1f} are free"
        )
        vars(config)["packing"] = config.packing._replace(tokens_per_row=fitting)


def further_bytes(context: Context, config: StageConfig, model: PackedModel, tokens: int) -> int:
    """Bytes that an update of such rows takes beside the model's weights, with those of a
    reference: at most, as if all tokens had labels and each key were gathered twice.
    """
    sizes = Model(model, config.trainable_layers)
    update = update_memory(
        sizes,
        Lengths(tokens, 2 * tokens, tokens),
        context.precision,
        checkpointing=config.gradient_checkpointing,
        optimizer=config.optimizer,
        kernels=False,
    )
    second = config.needs_reference and not config.lora_rank
    reference = sizes.parameters * context.precision.weights.itemsize if second else 0
    return update.peak + reference - sum(parameter.nbytes for parameter in model.parameters())
