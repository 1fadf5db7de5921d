from types import SimpleNamespace

import pytest

from fastp3o.objectives.p3o import P3OConfig
from fastp3o.precision import choose_precision
from fastp3o.training.online import print_warnings
from fastp3o.training.setup import make_accelerator


@pytest.mark.parametrize("engine", ["FSDP", "DEEPSPEED"])
def test_an_engine_of_accelerates_configuration_is_refused(monkeypatch, engine):
    monkeypatch.setenv(f"ACCELERATE_USE_{engine}", "true")
    with pytest.raises(ValueError, match=f"asks for {engine}, and fastp3o shards models itself: start with torchrun"):
        make_accelerator(0, choose_precision("fp32", "fp32"))


def test_processes_that_accelerate_does_not_see_are_refused(monkeypatch):
    monkeypatch.delenv("ACCELERATE_USE_CPU", raising=False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr("accelerate.Accelerator.num_processes", 1)
    with pytest.raises(ValueError, match=r"torchrun started 2 processes, and accelerate sees 1: .*ACCELERATE_USE_CPU"):
        make_accelerator(0, choose_precision("fp32", "fp32"))


def test_idle_processes_and_few_prompts_are_said(capsys):
    """A minibatch of as many prompts as processes keeps each of them busy."""
    for processes, prompts, said in (
        (4, 64, ""),
        (5, 64, "so 1 of 5 processes have nothing"),
        (4, 63, "some come again"),
    ):
        accelerator = SimpleNamespace(num_processes=processes, print=print)
        config = P3OConfig(model="m", output_dir="o", prompts="p", reward="r")
        print_warnings(SimpleNamespace(accelerator=accelerator), config, prompts)
        printed = capsys.readouterr().out
        assert said in printed
        assert bool(said) == bool(printed)
