"""Whole online runs on the pretended device: where an update's host waits, and how much it
launches.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from fastp3o.objectives.ppo import estimate_advantages, whiten
from fastp3o.run.phases import Phases
from fastp3o.training.loop import train
from tests.fastp3o.runs import config, metrics
from tests.simulated_cuda.host import Record, recorded, write_counts

# Launches of an update of four optimizer steps of the tiny Llama and of the log-probs before them,
# most of them the model's own. With older versions of torch and transformers there are some more.
LAUNCHES = {"fp32": 1400, "bf16": 980, "bf16-autocast": 1160, "fp16": 1050}
# Places where one update's host waits, except in its rollouts. The clock of the phases waits as
# well. Layers do in transformers' `generate` alone, whose attention looks at the mask.
WAITS = {
    ("fastp3o/training/metrics.py", "update_metrics"): 1,
    ("fastp3o/runtime/finiteness.py", "require_finite"): 1,
    ("fastp3o/optimizer/optimizer.py", "Optimizer.require_finite"): 1,
}


def sampling(place: tuple[str, str]) -> bool:
    """Whether a wait is of `generate`, which goes through our layers, too; other phases' are looked
    at alone.
    """
    return "sampler" in place[0] or place[1] == "wired"


@pytest.mark.parametrize("precision", LAUNCHES)
def test_an_update_waits_for_nothing_until_its_report(
    tiny_model, workplace, monkeypatch, precision
):
    phases: dict[str, list[Record]] = {}  # of each phase of an update, update by update

    @contextmanager
    def phase(self: Phases, name: str) -> Iterator[None]:
        with recorded() as record:
            yield
        phases.setdefault(name, []).append(record)
        self.seconds[name] = 1.0

    monkeypatch.setattr(Phases, "__call__", phase)
    runs, settings = {}, {"precision": precision, "sampler": "transformers", "deterministic": True}
    for updates in (1, 2):
        with recorded() as runs[updates]:
            train(config(tiny_model, f"run{updates}", updates=updates, **settings))
        assert len(metrics(f"run{updates}")) == updates
    assert torch.are_deterministic_algorithms_enabled()
    assert not any(record.waits for name in ("logprobs", "update") for record in phases[name])
    further = runs[2].places()
    further.subtract(runs[1].places())
    waits = {place: count for place, count in further.items() if count and not sampling(place)}
    last = {name: phases[name][-1] for name in ("logprobs", "update")}
    counts = {"launches": {name: record.launches.total() for name, record in last.items()}}
    assert sum(counts["launches"].values()) <= LAUNCHES[precision], last["update"].table()
    write_counts(
        precision,
        counts | {"waits around them": {" ".join(place): count for place, count in waits.items()}},
    )
    assert waits == WAITS


# Launches of a doubling of the terms, and of all else.
DOUBLING, BESIDE = 4, 10


@pytest.mark.parametrize(("longest", "doublings"), [(8, 3), (1024, 10)])
def test_advantages_of_ppo_double_their_terms_with_each_pass(longest, doublings):
    lengths = [longest, 1, longest // 2]
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).to("cuda")
    rewards, values = torch.randn(2, sum(lengths)).to("cuda")
    with recorded() as record:
        estimate_advantages(rewards, values, cu_seqlens, longest, gae_lambda=0.95)
    assert record.launches.total() <= BESIDE + DOUBLING * doublings, record.table()
    write_counts(
        f"advantages of PPO, at most {longest} tokens", {"launches": record.launches.total()}
    )
    with recorded() as whitening:
        whiten([rewards, values], lambda sums: sums)
    assert not record.waits + whitening.waits, record.table()
