"""Supervised steps on the pretended device: the host waits once a step, for the step before it."""

from collections import Counter

import pytest

from fastp3o.objectives.config.preferences import OFFLINE_OBJECTIVES
from fastp3o.run.device_clock import LateNumbers
from fastp3o.training import preferences as preference
from fastp3o.training import reward_model, sft
from tests.fastp3o.runs import metrics
from tests.simulated_cuda.host import Record, recorded, records, write_counts

STEP = "aten._fused_adamw_.default"  # launched once in each optimizer step


def train(stage: str, model: str, folder: str, epochs: int) -> Record:
    data = {"sft": "sft", "kto": "unpaired"}.get(stage, "preferences")
    settings = {
        "model": model,
        "output_dir": folder,
        "train_data": f"{data}.jsonl",
        "batch_size": 2,
        "epochs": epochs,
    }
    settings |= {
        "max_prompt_tokens": 32,
        "max_response_tokens": 16,
        "report_to": "none",
        "precision": "fp16",
    }
    module = {"sft": sft, "reward model": reward_model}.get(stage, preference)
    configs = OFFLINE_OBJECTIVES | {
        "sft": sft.SFTConfig,
        "reward model": reward_model.RewardModelConfig,
    }
    with recorded() as record:
        module.train(configs[stage](**settings))
    return record


@pytest.mark.parametrize("stage", ["sft", "reward model", "dpo", "kto"])
def test_a_step_waits_once_after_the_next_one_is_launched(
    tiny_model, workplace, monkeypatch, stage
):
    launched, read = [], LateNumbers.read

    def noted(numbers: LateNumbers) -> list[float]:
        launched.append(records[-1].launches[STEP])
        return read(numbers)

    monkeypatch.setattr(LateNumbers, "read", noted)
    few, many = (train(stage, tiny_model, f"run{epochs}", epochs) for epochs in (1, 3))
    steps = [len(metrics(f"run{epochs}")) for epochs in (1, 3)]
    assert many.launches[STEP] == steps[1]
    further = Counter(many.places())
    further.subtract(few.places())
    waits = {place: count for place, count in further.items() if count}
    each = {" ".join(place): count / (steps[1] - steps[0]) for place, count in waits.items()}
    write_counts(f"{stage}, of a step", {"waits": each})
    assert waits == {("fastp3o/run/device_clock.py", "LateNumbers.read"): steps[1] - steps[0]}
    assert launched[-steps[1] :] == [*range(2, steps[1] + 1), steps[1]]
