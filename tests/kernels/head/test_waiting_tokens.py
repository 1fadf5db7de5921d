import torch
from hypothesis import given
from hypothesis import strategies as st

from fastp3o_kernels.head.backward import WaitingTokens


@given(spans=st.lists(st.tuples(st.lists(st.booleans(), min_size=1, max_size=50), st.booleans()), max_size=6))
def test_tokens_that_take_part_move_to_the_front(spans):
    waiting = WaitingTokens()
    begin, places, expected = 1000, [], set()
    for flags, known in spans:
        span = slice(begin, begin + len(flags))
        waiting.add(span, torch.tensor(flags).bool() if known else None)
        places += range(span.start, span.stop)
        numbered = zip(range(span.start, span.stop), flags, strict=True)
        expected |= {token for token, flag in numbered if flag or not known}
        begin += 2 * len(flags)
    assert waiting.number == len(places)
    tokens, moves = waiting.release()
    # The buffer's rows, in which the moves happen one after the other.
    buffer = torch.tensor(places, dtype=torch.long)
    for source, target in moves:
        buffer[target] = buffer[source]
    assert buffer[: len(tokens)].tolist() == tokens.tolist()
    assert len(tokens) == len(expected)
    assert set(tokens.tolist()) == expected
    assert waiting.number == 0
    assert len(waiting.release()[0]) == 0
