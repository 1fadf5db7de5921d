"""Runs on states that are kept of frozen layers are those that compute them, up to rounding."""

import json
import random
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState

from benchmarks.alpaca_eval import task_of
from benchmarks.frozen_states import FrozenStates
from fastp3o.run.names import METRICS
from fastp3o.training.config import RewardModelConfig
from fastp3o.training.supervised import train_supervised
from tests.fastp3o.conftest import tiny_model, tokenizer  # noqa: F401


@pytest.mark.parametrize("preference_dim", [0, 2])
def test_a_run_on_kept_states_has_the_losses_of_one_that_computes_them(
    tiny_model,  # noqa: F811
    tmp_path,
    monkeypatch,
    preference_dim,
):
    monkeypatch.chdir(tmp_path)
    generator = random.Random(0)
    words = [["".join(generator.choices("abcdef", k=generator.randint(1, 9)))] for _ in range(60)]
    records = [
        {"prompt": f"{number}: {prompt}", "chosen": chosen, "rejected": rejected + "z"}
        for number, ((prompt,), (chosen,), (rejected,)) in enumerate(
            zip(words[:20], words[20:40], words[40:], strict=True)
        )
    ]
    Path("pairs.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))

    def losses(name: str, states: FrozenStates | None) -> list[float]:
        AcceleratorState._reset_state(reset_partial_state=True)
        settings = {"trainable_layers": 1, "batch_size": 5, "learning_rate": 1e-2, "epochs": 2}
        config = RewardModelConfig(
            model=tiny_model,
            train_data="pairs.jsonl",
            output_dir=name,
            preference_dim=preference_dim,
            precision="fp32",
            tokens_per_row=64,
            max_response_tokens=16,
            report_to="none",
            **settings,
        )
        task = task_of(config)
        if states is not None:
            load = task.load_model
            task.load_model = lambda *given, **options: states.used_by(load(*given, **options))
        train_supervised(task, None)
        return [
            json.loads(line)["loss"] for line in (Path(name) / METRICS).read_text().splitlines()
        ]

    computed = losses("computed", None)
    assert len(set(computed)) == len(computed) == 8
    states = FrozenStates(Path("states.pt"), 1)
    assert losses("keeping", states) == pytest.approx(computed, rel=1e-4)
    assert len(states.kept) == 20
    states.save()
    again = FrozenStates(Path("states.pt"), 1)
    assert losses("reading", again) == pytest.approx(computed, rel=1e-4)
    # What is kept is what runs: other states are another run.
    for kept in again.kept.values():
        kept += torch.randn(kept.shape, generator=torch.manual_seed(0))
    assert losses("other", again) != pytest.approx(computed, rel=1e-2)
