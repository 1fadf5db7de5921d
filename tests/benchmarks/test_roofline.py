import pytest

from benchmarks.roofline import BANDWIDTH, LAUNCH, OPERATIONS, WAIT, Counts, Model, Phase, body_counts, llama, phases

TINY = Model("tiny", llama(64, 128, 2, tied=True), devices=1)


def test_a_body_s_products_are_those_of_its_weights():
    forward, backward = body_counts(TINY, 16)
    assert forward.operations == 2 * 16 * TINY.layer_weights
    assert backward.operations == 2 * forward.operations
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
