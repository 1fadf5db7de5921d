import json

import pytest

from benchmarks.roofline import (
    BANDWIDTH,
    COMPILED,
    LAUNCH,
    OPERATIONS,
    ROW,
    WAIT,
    Counts,
    Model,
    Phase,
    body_counts,
    compiled_counts,
    in_turns,
    llama,
    phases,
    updates,
)

TINY = Model("tiny", llama(64, 128, 2, tied=True), devices=1)


def test_a_body_s_products_are_those_of_its_weights():
    forward, backward = body_counts(TINY, 16)
    products = 2 * 16 * TINY.layer_weights
    # In transformers 5.17 the angles of positions are a product, too, without a gradient.
    angles = 2 * 16 * TINY.config.head_dim // 2
    assert forward.operations - products in (0, angles)
    assert backward.operations == 2 * products
    # Each layer launches its seven products.
    assert forward.launches > 2 * 7
    assert forward.other_bytes > 0


@pytest.mark.parametrize(
    ("counts", "bound", "seconds"),
    [
        (Counts(OPERATIONS, BANDWIDTH / 2, BANDWIDTH / 4, 10), "products", 1.25),
        (Counts(OPERATIONS / 2, BANDWIDTH, 0, 10), "weights and keys read", 1.0),
        (Counts(OPERATIONS / 9, 0, BANDWIDTH / 4, 10), "other memory traffic", 1 / 9 + 0.25),
        (Counts(OPERATIONS / 9, 0, 0, round(1 / LAUNCH)), "host", 1.0),
    ],
)
def test_the_longest_part_bounds_a_phase(counts, bound, seconds):
    phase = Phase("phase", counts)
    assert phase.bound() == bound
    assert phase.total() == pytest.approx(seconds)


def test_the_device_stands_still_at_a_wait():
    assert Phase("phase", Counts(OPERATIONS, 0, 0, 1), waits=3).total() == pytest.approx(1 + 3 * WAIT)


def test_an_update_has_every_phase():
    forward, backward = body_counts(TINY, 16)
    found = phases(TINY, forward, backward)
    assert len({phase.name for phase in found}) == 8
    assert all(phase.total() > 0 for phase in found)


def test_compiled_layers_have_the_same_products_and_fewer_kernels():
    layer = json.loads(COMPILED.read_text())["layers"]["1 B"]
    tiny = Model("tiny", llama(2048, 8192, 2, tied=True), devices=1)
    for plain, compiled in zip(body_counts(tiny, ROW), compiled_counts(tiny, ROW, layer), strict=True):
        assert compiled.operations == plain.operations
        assert compiled.product_bytes == pytest.approx(plain.product_bytes, rel=1e-6)
        assert compiled.other_bytes < plain.other_bytes / 2
        assert compiled.launches < plain.launches / 2


def test_phases_that_layers_do_not_change_stand_once():
    kernels = {"fused": 1, "products": 7, "attention": 1, "fused_bytes": 1, "product_bytes": 1}
    both = updates(TINY, {"forward": kernels, "backward": kernels})
    names = [phase.name for phase in in_turns(*both)]
    changed = [name.removesuffix(", layers compiled") for name in names if name.endswith(", layers compiled")]
    assert changed == ["old log-probs", "reference log-probs", "body forward", "body backward"]
    assert len(names) == 8 + 4
