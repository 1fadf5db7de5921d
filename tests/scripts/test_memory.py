import copy
from itertools import product
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.peak_memory import PeakMemory
from fastp3o.commands.predicted_memory import Lengths, Model, frozen_memory, rollout_memory, sharded, update_memory
from fastp3o.config import TrainableConfig
from fastp3o.models.packed_model import PackedModel, labelled_logprobs
from fastp3o.models.trainable import choose_trainable
from fastp3o.objectives.base import Microbatch
from fastp3o.objectives.p3o import P3O, P3OConfig
from fastp3o.packing.pack import Packing, pack
from fastp3o.precision import choose_precision
from fastp3o.rollouts.cache import Room
from fastp3o.rollouts.engine import Engine, layer_shapes
from fastp3o_kernels.decoding import response_keys

OBJECTIVE = P3O(P3OConfig(model="", output_dir="", prompts="", reward=""))
# hidden, intermediate, key heads, layers, vocabulary; pairs, prompt, response. In half precision the CPU widens the
# head's operands, which no GPU does, so only small vocabularies are tried there; and CPUs take seconds for few tokens.
DEEP = (128, 384, 2, 4, 512), (8, 60, 20)
WIDE = (256, 1024, 2, 2, 1024), (4, 128, 32)
DEEP_HALF = DEEP[0], (3, 60, 20)
LARGE_HEAD = (128, 344, 4, 4, 4096), (8, 40, 40)


def llama(hidden, intermediate, layers, heads, key_heads, vocabulary, tied) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        vocab_size=vocabulary,
        tie_word_embeddings=tied,
    )


def random_model(hidden, intermediate, key_heads, layers, vocabulary, precision):
    config = llama(hidden, intermediate, layers, 4 if hidden == 128 else 8, key_heads, vocabulary, True)
    model = PackedModel(LlamaForCausalLM(config)).train()
    for parameter in model.parameters():
        parameter.data = parameter.data.to(precision.weights)
    return model


def random_row(pairs, prompt, response, share_prompts):
    responses = [[6] * response, [7] * response]
    (row,) = pack([[5] * prompt] * pairs, [responses] * pairs, Packing(10**6, share_prompts))
    return row


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(
    ("precision", "sizes", "share_prompts", "trained_layers"),
    [
        ("fp32", DEEP, True, 0),
        ("fp32", DEEP, True, 2),
        ("fp32", WIDE, False, 0),
        ("fp32", LARGE_HEAD, True, 0),
        ("bf16", DEEP_HALF, True, 0),
        ("bf16-autocast", DEEP_HALF, True, 0),
    ],
)
def test_the_peak_of_an_update_is_predicted_within_a_tenth(
    precision, sizes, share_prompts, trained_layers, checkpointing
):
    model_sizes, (P, prompt, response) = sizes
    precision = choose_precision(precision, "fp32")
    model, row = random_model(*model_sizes, precision), random_row(P, prompt, response, share_prompts)
    choose_trainable(model, TrainableConfig(trainable_layers=trained_layers))
    if checkpointing:
        model.recompute_activations()
    old = torch.full((P, 2), -response * torch.tensor(float(model_sizes[-1])).log())
    microbatch = Microbatch(row, torch.randn(P, 2), old, old, old, old)

    def update():
        with torch.autocast("cpu", torch.bfloat16, enabled=precision.autocast is not None):
            loss, _ = OBJECTIVE.loss(model, microbatch, P)
        loss.backward()

    update()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    with PeakMemory() as measured:
        update()
    parameters, trains = model.model.num_parameters(), sum(parameter.numel() for parameter in trained)
    parts = {"trained_layers": trained_layers, "head_trains": not trained_layers}
    sizes = Model.from_config(model.model.config, parameters, trains, **parts)
    lengths = Lengths(row.tokens, sum(row.segments.key_lengths), len(row.labels))
    predicted = update_memory(sizes, lengths, precision, checkpointing=checkpointing, one_by_one=True)
    kept = parameters * precision.weights.itemsize + predicted.masters + predicted.gradients + predicted.optimizer
    assert predicted.peak - kept == pytest.approx(measured.peak, rel=0.1)


def test_the_peak_of_the_reference_is_predicted_within_a_tenth():
    precision = choose_precision("fp32", "fp32")
    model, row = random_model(*LARGE_HEAD[0], precision), random_row(*LARGE_HEAD[1], True)
    with torch.no_grad(), PeakMemory() as measured:
        labelled_logprobs(model, row)
    sizes = Model.from_config(model.model.config, model.model.num_parameters(), 0)
    lengths = Lengths(row.tokens, sum(row.segments.key_lengths), len(row.labels))
    predicted = frozen_memory(sizes, lengths, precision)
    assert predicted.peak - predicted.weights == pytest.approx(measured.peak, rel=0.1)


@pytest.mark.parametrize("sizes", [DEEP, LARGE_HEAD])
def test_the_peak_of_rollouts_is_predicted_within_a_tenth(sizes):
    model_sizes, (P, prompt, response) = sizes
    precision = choose_precision("fp32", "fp32")
    model = random_model(*model_sizes, precision).eval()
    room = Room(8 * P, prompt - 1, 2, 16 * P, response)
    prompts, keys = [[5] * prompt] * 8 * P, response_keys(0, torch.arange(8 * P), 2)
    shapes = layer_shapes(model, 3)
    with PeakMemory() as measured:
        engine = Engine(model, shapes, room, {0})
        engine.tokens_per_row = 256
        engine.run(prompts, keys)
    sizes = Model.from_config(model.model.config, model.model.num_parameters(), 0)
    predicted = rollout_memory(sizes, room, precision, probabilities=True)
    assert predicted.cache == room.tokens * sum(shape.bytes_per_token for shape in shapes.values())
    assert predicted.cache + predicted.head == pytest.approx(measured.peak, rel=0.1)


LLAMAS = {
    "0.5 B": llama(896, 4864, 24, 14, 2, 151936, True),
    "1.2 B": llama(2048, 8192, 16, 32, 8, 128256, True),
    "8 B": llama(4096, 14336, 32, 32, 8, 128256, False),
    "70 B": llama(8192, 28672, 80, 64, 8, 128256, False),
}
TRAINS = {
    "all": (TrainableConfig(), False),
    "all, checkpointed": (TrainableConfig(), True),
    "top two layers": (TrainableConfig(trainable_layers=2), False),
    "LoRA of rank 16, checkpointed": (TrainableConfig(lora_rank=16), True),
}
FP16 = choose_precision("fp16", "fp16")
PAGES = Path(__file__).parents[2] / "fastp3o" / "training"


def model_sizes(config: LlamaConfig, trainable: TrainableConfig) -> Model:
    with torch.device("meta"):
        model = PackedModel(LlamaForCausalLM(copy.deepcopy(config)))
        choose_trainable(model, trainable)
    trains = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    parts = {"trained_layers": trainable.trainable_layers, "head_trains": model.head().weight.requires_grad}
    return Model.from_config(model.model.config, model.model.num_parameters(), trains, **parts)


def test_the_pages_table_is_what_the_formula_gives():
    for size, trains in product(list(LLAMAS)[:3], TRAINS):
        trainable, checkpointing = TRAINS[trains]
        sizes = model_sizes(LLAMAS[size], trainable)
        cells = []
        for tokens, prompt, response in ((1, 350, 40), (1, 1024, 256), (8192, 350, 40)):
            lengths = Lengths.full_row(Packing(tokens), prompt=prompt, response=response)
            reference = 0 if trainable.lora_rank else frozen_memory(sizes, lengths, FP16).weights
            update = update_memory(sizes, lengths, FP16, checkpointing=checkpointing)
            cells.append(f"{(update.peak + reference) / 1e9:.1f}")
        assert f"| {size} | {trains} | {' | '.join(cells)} |" in (PAGES / "memory.md").read_text()


def test_the_pages_table_of_several_gpus_is_what_the_formula_gives():
    for size, gpus in product(("8 B", "70 B"), (8, 64)):
        sizes = model_sizes(LLAMAS[size], TrainableConfig())
        lengths = Lengths.full_row(Packing(8192), prompt=350, response=40)
        alone = update_memory(sizes, lengths, FP16, checkpointing=True)
        update = sharded(alone, sizes, FP16, gpus)
        frozen = 2 * sizes.parameters // gpus
        whole = 2 * sizes.parameters + update.masters + update.optimizer
        cells = [f"{bytes / 1e9:.0f}" for bytes in (update.peak + frozen, whole + frozen)]
        assert f"| {size} | {gpus} | {' | '.join(cells)} |" in (PAGES / "several_gpus.md").read_text()
