"""Counted traffic of a layer is that of a formula."""

import json

import pytest
import torch

from benchmarks import layer_traffic
from benchmarks.layer_traffic import PRECISIONS, RESULT, ROW, SIZES, STEP, passes, policy_of
from fastp3o.runtime.precision import named_precision
from fastp3o.training.predicted_memory import Lengths, Model, kept_by_a_layer
from fastp3o_kernels.layers.norm_kernel import PROGRAMS


def formula(sizes, tokens):
    """Bytes besides products in half precision, the stream in fp32: forward and backward."""
    D, F = sizes.hidden, sizes.intermediate
    size = D // sizes.heads
    rotary = 4 * size * (sizes.heads + sizes.key_heads) + 4 * size
    # the stream read and normed; the same with a sum; a sum
    first, second, last = (6 * D, 12 * D, 10 * D)
    forward = first + rotary + second + 6 * F + last
    gradients = 6 * D + 10 * F + 6 * D + 16 * D + rotary + 2 * 6 * D + 14 * D
    weights = 2 * 2 * D
    programs = min(PROGRAMS, tokens)
    return tokens * forward + weights, tokens * gradients + 2 * weights + 2 * 2 * programs * 4 * D


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_bytes_are_those_of_the_formula(sizes, monkeypatch):
    monkeypatch.setattr(layer_traffic, "ROW", 300)
    found = passes(sizes, PRECISIONS["fp16"], fused=True)
    assert (found["forward"].bytes, found["backward"].bytes) == formula(sizes, 300)
    assert found["decode step"].bytes == formula(sizes, STEP)[0]
    weights = (
        2 * sizes.hidden**2 * (1 + sizes.key_heads / sizes.heads)
        + 3 * sizes.hidden * sizes.intermediate
    )
    assert found["forward"].products == 300 * weights
    assert found["backward"].products == 2 * 300 * weights


@pytest.mark.parametrize("name", PRECISIONS)
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_the_calculator_of_memory_knows_what_a_layer_keeps(sizes, name, monkeypatch):
    monkeypatch.setattr(layer_traffic, "ROW", 300)
    kept = passes(sizes, PRECISIONS[name], fused=True)["forward"].kept
    angles = 300 * 2 * PRECISIONS[name].weights.itemsize * sizes.hidden // sizes.heads
    model = Model(policy_of(sizes, PRECISIONS[name], fused=True))
    products = model.layer - 3 * sizes.hidden  # but the norms, the last one among them
    copies = 2 * products if PRECISIONS[name].autocast else 0
    predicted = kept_by_a_layer(model, Lengths(300, 300, 0), named_precision(name), kernels=True)
    assert kept - angles - copies == predicted


def test_a_plain_operation_counts_what_it_reads_and_writes():
    with layer_traffic.counted() as traffic:
        x = torch.empty(4, 6, dtype=torch.float16, device="meta")
        y = x.t() + x.new_empty(1, 4).expand(6, 4)  # which has four elements
        torch.mm(y, y.t())
    assert (traffic.launches, traffic.bytes) == (2, 2 * (24 + 4 + 24))
    assert (traffic.products, traffic.product_bytes) == (6 * 4 * 6, 2 * (24 + 36))


def test_the_record_is_of_the_layers_as_they_are():
    """Of what is fused: what transformers does depends on its version."""
    layers = json.loads(RESULT.read_text())["layers"]
    for model, sizes in SIZES.items():
        every = [
            one
            for one in layers
            if (one["model"], one["precision"], one["fused"]) == (model, "fp16", True)
        ]
        forward, backward, step = (one["bytes"] for one in every)
        assert (forward, backward) == formula(sizes, ROW)
        assert step == formula(sizes, STEP)[0]
