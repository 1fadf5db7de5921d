"""Whole online runs on the pretended device: they end, and their updates wait and launch no more than is said here."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from fastp3o.stages.online import train
from fastp3o.training.reporting import Phases
from tests.fastp3o.runs import config, metrics
from tests.simulated_cuda.record import Record, recorded

Phase = dict[str, list[Record]]


@pytest.fixture
def phases(monkeypatch: pytest.MonkeyPatch) -> Phase:
    """The records of each phase of an update, update by update."""
    records: Phase = {}

    @contextmanager
    def phase(self: Phases, name: str) -> Iterator[None]:
        with recorded() as record:
            yield
        records.setdefault(name, []).append(record)
        self.seconds[name] = 1.0

    monkeypatch.setattr(Phases, "__call__", phase)
    return records


PRECISIONS = ("fp32", "bf16", "bf16-autocast", "fp16")


@pytest.mark.parametrize("precision", PRECISIONS)
def test_an_update(tiny_model, workplace, phases, precision):
    train(config(tiny_model, "run", precision=precision, updates=2, sampler="transformers"))
    for name, records in phases.items():
        print(f"\n== {precision} {name}: {records[-1].table()}")
    assert len(metrics("run")) == 2
