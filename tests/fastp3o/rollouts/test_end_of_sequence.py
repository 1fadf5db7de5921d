from fastp3o.rollouts.end_of_sequence import cut_after_end


def test_a_response_ends_at_its_first_end():
    assert cut_after_end([5, 2, 6, 2], {2}) == [5, 2]
    assert cut_after_end([5, 6], {2}) == [5, 6]
