import pytest

from benchmarks.roofline import (
    OPERATIONS,
    WAIT,
    Counts,
    Model,
    Phase,
    body_counts,
    llama,
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


def test_the_device_stands_still_at_a_wait():
    assert Phase("phase", Counts(OPERATIONS, 0, 0, 1), waits=3).total() == pytest.approx(1 + 3 * WAIT)
