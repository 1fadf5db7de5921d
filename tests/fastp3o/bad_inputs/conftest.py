"""The folder where command lines of `working.py` run."""

import sys
from pathlib import Path
from typing import Any, NoReturn

import pytest

from fastp3o.data import encoding
from fastp3o.rollouts.engine_sampler import EngineSampler
from fastp3o.rollouts.transformers_sampler import TransformersSampler
from fastp3o.run.run import Run
from tests.fastp3o.bad_inputs.broken_models import make_models
from tests.fastp3o.bad_inputs.working import BegunError


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory, tiny_model: str) -> Path:
    folder = tmp_path_factory.mktemp("models")
    make_models(folder, tiny_model)
    return folder


@pytest.fixture
def place(workplace: Path, models: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (workplace / "models").symlink_to(models)
    monkeypatch.setattr(encoding, "TIME_LIMIT", 0.5)
    monkeypatch.delitem(sys.modules, "bad_rewards", raising=False)
    return workplace


@pytest.fixture
def stopping(place: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of runs that stop where training or sampling would begin."""

    def begin(of: Any, *_: Any, **__: Any) -> NoReturn:
        raise BegunError(getattr(of, "config", None))

    monkeypatch.setattr(Run, "__iter__", begin)
    for sampler in (EngineSampler, TransformersSampler):
        monkeypatch.setattr(sampler, "__call__", begin)
    # No name of a model is looked up elsewhere.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return place
