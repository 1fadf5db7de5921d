import torch
from hypothesis import given
from hypothesis import strategies as st

from fastp3o_kernels.head.backward import WaitingRows


@given(pieces=st.lists(st.lists(st.booleans(), min_size=1, max_size=50), max_size=6))
def test_rows_with_a_coefficient_move_to_the_front(pieces):
    waiting = WaitingRows()
    begin, places, expected = 1000, [], set()
    for flags in pieces:
        rows = slice(begin, begin + len(flags))
        waiting.add(rows, torch.tensor(flags).float())
        places += range(rows.start, rows.stop)
        expected |= {row for row, flag in zip(range(rows.start, rows.stop), flags, strict=True) if flag}
        begin += 2 * len(flags)
    assert waiting.number == len(places)
    rows, moves = waiting.take()
    # The buffer's places, in which the moves happen one after the other.
    buffer = torch.tensor(places, dtype=torch.long)
    for source, target in moves:
        buffer[target] = buffer[source]
    assert buffer[: len(rows)].tolist() == rows.tolist()
    assert len(rows) == len(expected)
    assert set(rows.tolist()) == expected
    assert waiting.number == 0
    assert len(waiting.take()[0]) == 0
