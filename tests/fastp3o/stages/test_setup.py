import pytest

from fastp3o.precision import choose_precision
from fastp3o.stages.setup import make_accelerator


@pytest.mark.parametrize("engine", ["FSDP", "DEEPSPEED"])
def test_an_engine_of_accelerates_configuration_is_refused(monkeypatch, engine):
    monkeypatch.setenv(f"ACCELERATE_USE_{engine}", "true")
    with pytest.raises(ValueError, match=f"asks for {engine}, and fastp3o shards models itself: start with torchrun"):
        make_accelerator(0, choose_precision("fp32", "fp32"))
