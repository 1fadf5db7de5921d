import copy
import json
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
from tests.fastp3o.together import together

OBJECTIVE = P3O(P3OConfig(model="", output_dir="", prompts="", reward=""))
# hidden, intermediate, key heads, layers, vocabulary; pairs, prompt, response. In half precision the CPU widens the
# head's operands, which no GPU does, so only small vocabularies are tried there; and CPUs take seconds for few tokens.
DEEP = (128, 384, 2, 4, 512), (8, 60, 20)
WIDE = (256, 1024, 2, 2, 1024), (4, 128, 32)
DEEP_HALF = DEEP[0], (3, 60, 20)
LARGE_HEAD = (128, 344, 4, 4, 4096), (8, 40, 40)


def random_model(hidden, intermediate, key_heads, layers, vocabulary, precision):
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_attention_heads=4 if hidden == 128 else 8,
        num_key_value_heads=key_heads,
        num_hidden_layers=layers,
        tie_word_embeddings=True,
    )
    model = PackedModel(LlamaForCausalLM(config)).train()
    for parameter in model.parameters():
        parameter.data = parameter.data.to(precision.weights)
    return model


def random_row(pairs, prompt, response, share_prompts):
    (row,) = pack(
        [[5] * prompt] * pairs,
        [[[6] * response, [7] * response]] * pairs,
        Packing(10**6, share_prompts),
    )
    return row


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(
    ("precision", "sizes", "share_prompts", "trained_layers"),
    [
        ("fp32", DEEP, True, 0),
        ("fp32", DEEP, True, 2),
        ("fp32", DEEP, False, 0),
        ("fp32", WIDE, True, 0),
        ("fp32", LARGE_HEAD, True, 0),
        ("bf16", DEEP_HALF, True, 0),
        pytest.param("bf16", WIDE, True, 0, marks=pytest.mark.nightly),
        ("bf16-autocast", DEEP_HALF, True, 0),
        pytest.param("bf16-autocast", WIDE, True, 0, marks=pytest.mark.nightly),
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
    vocabulary = model_sizes[-1]
    old = torch.full((P, 2), -response * torch.tensor(float(vocabulary)).log())
    microbatch = Microbatch(row, torch.randn(P, 2), old, old, old, old)

    def update():
        with torch.autocast("cpu", torch.bfloat16, enabled=precision.autocast is not None):
            loss, _ = OBJECTIVE.loss(model, microbatch, P)
        loss.backward()

    update()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    with PeakMemory() as measured:
        update()
    parameters = model.model.num_parameters()
    sizes = Model.from_config(
        model.model.config,
        parameters,
        sum(parameter.numel() for parameter in trained),
        trained_layers=trained_layers,
        head_trains=not trained_layers,
    )
    lengths = Lengths(row.tokens, sum(row.segments.key_lengths), len(row.labels))
    predicted = update_memory(sizes, lengths, precision, checkpointing=checkpointing, one_by_one=True)
    predicted_pass = (
        predicted.peak
        - parameters * precision.weights.itemsize
        - predicted.masters
        - predicted.gradients
        - predicted.optimizer
    )
    assert predicted_pass == pytest.approx(measured.peak, rel=0.1)


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


def test_lengths_of_a_full_row():
    shared = Lengths.full_row(Packing(1000), prompt=100, response=50)
    assert shared == Lengths(tokens=1000, keys=1500, labelled=500)
    plain = Lengths.full_row(Packing(1000, share_prompts=False), prompt=100, response=50)
    assert plain == Lengths(tokens=900, keys=900, labelled=300)
    assert Lengths.full_row(Packing(10), prompt=100, response=50).tokens == 200


LLAMAS = {
    "0.5 B": LlamaConfig(
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        vocab_size=151936,
        tie_word_embeddings=True,
    ),
    "1.2 B": LlamaConfig(
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
        tie_word_embeddings=True,
    ),
    "8 B": LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
    ),
}
TRAINS = {
    "all": (TrainableConfig(), False),
    "all, checkpointed": (TrainableConfig(), True),
    "top two layers": (TrainableConfig(trainable_layers=2), False),
    "LoRA of rank 16, checkpointed": (TrainableConfig(lora_rank=16), True),
}


LARGE_LLAMAS = {
    "8 B": LLAMAS["8 B"],
    "70 B": LlamaConfig(
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
        vocab_size=128256,
    ),
}
FP16 = choose_precision("fp16", "fp16")


PAGES = Path(__file__).parents[2] / "fastp3o" / "training"


def model_sizes(config: LlamaConfig, trainable: TrainableConfig) -> Model:
    with torch.device("meta"):
        model = PackedModel(LlamaForCausalLM(copy.deepcopy(config)))
        choose_trainable(model, trainable)
    return Model.from_config(
        model.model.config,
        model.model.num_parameters(),
        sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad),
        trained_layers=trainable.trainable_layers,
        head_trains=model.head().weight.requires_grad,
    )


def test_the_pages_table_is_what_the_formula_gives():
    for size, trains in product(LLAMAS, TRAINS):
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
    for (size, config), gpus in product(LARGE_LLAMAS.items(), (8, 64)):
        sizes = model_sizes(config, TrainableConfig())
        lengths = Lengths.full_row(Packing(8192), prompt=350, response=40)
        alone = update_memory(sizes, lengths, FP16, checkpointing=True)
        update = sharded(alone, sizes, FP16, gpus)
        frozen = 2 * sizes.parameters // gpus
        whole = 2 * sizes.parameters + update.masters + update.optimizer
        cells = [f"{bytes / 1e9:.0f}" for bytes in (update.peak + frozen, whole + frozen)]
        assert f"| {size} | {gpus} | {' | '.join(cells)} |" in (PAGES / "several_gpus.md").read_text()


@pytest.mark.nightly
@pytest.mark.parametrize(
    "case",
    [
        *("deep", "large head", "deep, bf16"),
        *(pytest.param(case, marks=pytest.mark.nightly) for case in ("wide", "wide, bf16")),
    ],
)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_peak_of_each_of_two_processes_is_predicted_within_a_tenth(two_processes, case, checkpointing):
    measured, predicted = two_processes[f"{case} {checkpointing}"]
    assert predicted == pytest.approx(measured, rel=0.1)


@pytest.fixture(scope="module")
def two_processes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[float]]:
    """Measures the cases of the tests that are chosen, in one run."""
    chosen = {item.callspec.params["case"] for item in request.session.items if "two_processes" in item.fixturenames}
    results = tmp_path_factory.mktemp("memory") / "results.json"
    done = together(Path(__file__).with_name("memory_of_a_process.py"), str(results), *chosen)
    assert done.returncode == 0, done.stdout
    return json.loads(results.read_text())
