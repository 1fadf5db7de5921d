import time

import pytest

from fastp3o.data.time_limit import TimeLimit, TookTooLongError


def loop_for_ever() -> None:
    while True:
        pass


def test_a_loop_without_end_ends_and_the_next_has_its_own_time():
    limit = TimeLimit(0.2)
    for _ in range(2):
        with pytest.raises(TookTooLongError), limit:
            loop_for_ever()


def test_what_ends_in_time_is_left_alone_afterwards():
    limit = TimeLimit(0.1)
    with limit:
        pass
    end = time.monotonic() + 0.3
    while time.monotonic() < end:
        pass
