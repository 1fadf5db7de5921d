"""What an update computes once, on the pretended device: launches that long responses do not multiply."""

import pytest
import torch

from fastp3o.objectives.ppo import estimate_advantages, whiten
from tests.simulated_cuda.host import recorded, write_counts

DEVICE = torch.device("cuda")
# Launches of a doubling of the terms, and of all else.
DOUBLING, BESIDE = 4, 10


@pytest.mark.parametrize(("longest", "doublings"), [(8, 3), (1024, 10)])
def test_advantages_of_ppo_double_their_terms_with_each_pass(longest, doublings):
    lengths = [longest, 1, longest // 2]
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).to(DEVICE)
    rewards, values = torch.randn(2, sum(lengths)).to(DEVICE)
    with recorded() as record:
        estimate_advantages(rewards, values, cu_seqlens, longest, gae_lambda=0.95)
    assert record.launches.total() <= BESIDE + DOUBLING * doublings, record.table()
    write_counts(f"advantages of PPO, at most {longest} tokens", {"launches": record.launches.total()})
    with recorded() as whitening:
        whiten([rewards, values], lambda sums: sums)
    assert not record.waits + whitening.waits, record.table()
