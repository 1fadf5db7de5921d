"""Rows on a CPU are as long as memory allows, unless their length is named."""

import re
from types import SimpleNamespace

import pytest

from fastp3o import SFTConfig, train
from fastp3o.models.packed_model import PackedModel
from fastp3o.packing.settings import Packing
from fastp3o.runtime.precision import choose_precision
from fastp3o.training import row_length
from tests.fastp3o.models.model_families import CONFIGS, random_model
from tests.fastp3o.runs import config, metrics

FREE = 2e7  # bytes, for rows of thousands of tokens of the tiny model
SMALL = {"updates": 1, "max_response_tokens": 4, "sampler": "transformers"}


def rows(made, monkeypatch, capsys, free: float) -> int:
    """Tokens of a row, of which a run must say that they are fewer than asked for."""
    monkeypatch.setattr(row_length, "free_host_memory", lambda: int(free))
    train(made)
    said = re.findall(
        r"--tokens_per_row: (\d+), since an update of 8192 takes about .* GB",
        capsys.readouterr().out,
    )
    return int(said[0]) if said else made.packing.tokens_per_row


def test_rows_are_halved_until_memory_holds_them_and_a_named_length_stays(
    workplace, tiny_model, monkeypatch, capsys
):
    found = {
        free: rows(config(tiny_model, f"{free:.0e}", **SMALL), monkeypatch, capsys, free)
        for free in (1e12, FREE, 0)
    }
    assert found[1e12] == 8192
    assert 512 < found[FREE] < 8192
    assert found[0] == 512
    efficiency = {
        tokens: metrics(f"{free:.0e}")[0]["packing_efficiency"] for free, tokens in found.items()
    }
    assert efficiency[512] == pytest.approx(efficiency[8192] * 8192 / 512)
    assert (
        rows(config(tiny_model, "named", **SMALL, tokens_per_row=4096), monkeypatch, capsys, 0)
        == 4096
    )


def test_so_are_those_of_supervised_stages(workplace, tiny_model, monkeypatch, capsys):
    made = SFTConfig(
        model=tiny_model, output_dir="sft", train_data="sft.jsonl", batch_size=4, report_to="none"
    )
    assert rows(made, monkeypatch, capsys, 0) == 512


def test_what_saves_memory_leaves_longer_rows(workplace, tiny_model, monkeypatch, capsys):
    plain, saving = (
        config(tiny_model, str(saves), **SMALL, gradient_checkpointing=saves)
        for saves in (False, True)
    )
    assert rows(saving, monkeypatch, capsys, FREE) > rows(plain, monkeypatch, capsys, FREE)


@pytest.mark.parametrize("family", CONFIGS)
def test_every_family_has_an_estimate(family):
    context = SimpleNamespace(precision=choose_precision("fp32", "fp32"))
    model = PackedModel(random_model(family))
    few, many = (
        row_length.further_bytes(
            context,
            model,
            tokens,
            trainable_layers=0,
            optimizer="adamw",
            checkpointing=False,
            second_model=False,
        )
        for tokens in (512, 1024)
    )
    assert 0 < few < many


def test_processes_take_the_shortest(monkeypatch):
    said: list[str] = []
    accelerator = SimpleNamespace(num_processes=2, print=said.append)
    context = SimpleNamespace(accelerator=accelerator)
    monkeypatch.setattr(row_length, "free_host_memory", lambda: 10**12)
    monkeypatch.setattr(row_length, "gather_object", lambda own: [*own, 1024])
    packing = row_length.fitting(context, Packing(8192), lambda tokens: tokens)
    assert packing == Packing(1024)
    assert said[0].startswith("--tokens_per_row: 1024, since")
