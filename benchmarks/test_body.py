"""Updates, log-probs and rollouts of one policy whose layers compute in several ways
(`layer_ways.py`).

    python -m pytest benchmarks/test_body.py

The bound of an update and of log-probs is the products of the linear layers and the head; what else
they take is the body's: norms, rotary positions, gates and attention.
"""

import statistics
from collections.abc import Sequence
from functools import partial
from unittest.mock import patch

import pytest
import torch
from torch import nn

from benchmarks import bare_operations
from benchmarks.host_work import launches_by_name
from benchmarks.layer_ways import LAYERS, policy_with
from benchmarks.measure import Case, measure, milliseconds
from benchmarks.rollout_ways import END, ENGINE, by_engine
from benchmarks.shapes import DTYPE, TRIAL, dtype_name, typed
from benchmarks.test_packing import LAYOUTS
from benchmarks.test_rollouts import CASES, random_prompts
from benchmarks.training_shapes import CONFIG, LENGTHS, RESPONSES, random_groups
from fastp3o.models.packed_model import labeled_logprobs
from fastp3o.packing.packed_row import Ids
from fastp3o.rollouts.engine import Engine

COMPARED = LENGTHS[:2], RESPONSES[:1]
ROUNDS = 1 if TRIAL else 4
# Of the kernels that an update launches, the longest.
MOST_KERNELS = 40


def ways_and_shapes() -> list:
    """All shapes as runs compute, the first of them in every way."""
    shapes = [(lengths, K) for lengths in LENGTHS for K in RESPONSES]
    return [
        pytest.param(layers, lengths, K, id=typed((layers, lengths, K)))
        for layers in LAYERS
        for lengths, K in shapes
        if layers == "fastp3o" or (lengths in COMPARED[0] and K in COMPARED[1])
    ]


@pytest.mark.parametrize("gradients", [True, False], ids=["update", "log-probs"])
@pytest.mark.parametrize(("layers", "lengths", "K"), ways_and_shapes())
def test_share_of_the_products(benchmark, layers, lengths, K, gradients):
    """With shared prompts, in turns with nothing but the products of the linear layers and the
    head, by torch.mm: `ratio_to_bare` is the time over theirs.
    """
    policy = policy_with(layers)
    update = LAYOUTS["shared prompts"](policy, *random_groups(lengths, K))
    linear = [
        module.weight
        for module in policy.model.base_model.modules()
        if isinstance(module, nn.Linear)
    ]
    passes, each = len(update.losses), (1, int(gradients), int(gradients))
    products = [
        bare_operations.linear_products(
            weight.new_empty(rows // passes, weight.shape[1]).normal_(), weight, *each
        )
        for weight, rows in [
            *((weight, update.tokens) for weight in linear),
            (policy.head().weight, update.labeled),
        ]
    ]
    shape = update.labeled, CONFIG.hidden_size, CONFIG.vocab_size, dtype_name(DTYPE)
    name = f"{'update' if gradients else 'log-probs'}, prompts of {lengths.prompt}, {K} responses of {lengths.response}"

    def bare() -> None:
        for _ in range(passes):
            for product in products:
                product()

    def logprobs(_: object) -> None:
        with torch.no_grad():
            for row in update.rows:
                labeled_logprobs(policy, row)

    measure(
        benchmark,
        Case(level_of(layers), layers, name, *shape, bytes=0, operations=0, gradient_bytes=0),
        prepare=lambda: policy.zero_grad(set_to_none=False),
        run=(lambda _: update.run()) if gradients else logprobs,
        bare=bare,
    )


def level_of(layers: str) -> str:
    """What runs compute is the model's; the others explain it."""
    return "model" if layers == "fastp3o" else "layers"


@pytest.mark.parametrize("layers", LAYERS)
def test_engine(benchmark, layers):
    """Milliseconds of a rollout, those of its prompts, and those of the rest: the steps."""
    policy, case = policy_with(layers), CASES[0]
    prompts = random_prompts(case, CONFIG.vocab_size)
    policy.model.generation_config.eos_token_id = [END]
    prefill: list[float] = []

    def timed(engine: Engine, prompts: Sequence[Ids]) -> None:
        prefill.append(milliseconds(lambda: of_prompts(engine, prompts)))

    of_prompts = Engine.prefill
    by_engine(policy, prompts, case, 0)
    whole = [
        milliseconds(partial(by_engine, policy, prompts, case, seed)) for seed in range(ROUNDS)
    ]
    with patch.object(Engine, "prefill", timed), torch.no_grad():
        benchmark.pedantic(lambda: by_engine(policy, prompts, case, ROUNDS), rounds=ROUNDS)
    policy.train()
    ENGINE.made.clear()  # which keeps the policy
    ms, prefill_ms = statistics.median(whole), sum(prefill) / ROUNDS
    found = {"ms": ms, "prefill_ms": prefill_ms, "decode_ms": ms - prefill_ms}
    benchmark.extra_info |= (
        case._asdict()
        | {"tokens": case.P * case.K * case.response}
        | found
        | {"level": "engine", "implementation": layers}
    )


@pytest.mark.parametrize("layers", LAYERS)
def test_kernels_of_an_update(benchmark, layers):
    """`kernels`: those that take longest, of an update at the first lengths."""
    policy = policy_with(layers)
    update = LAYOUTS["shared prompts"](policy, *random_groups(LENGTHS[0], RESPONSES[0]))
    update.run()
    kernels = benchmark.pedantic(launches_by_name, args=(update.run,))
    policy.zero_grad(set_to_none=False)
    found = {
        "launches": sum(kernel.launches for kernel in kernels),
        "gpu_ms": sum(kernel.ms for kernel in kernels),
    }
    found |= {"tokens": update.tokens, "kernels": kernels[:MOST_KERNELS]}
    benchmark.extra_info |= found | {"level": "kernels", "implementation": layers}
