import copy
import json
from dataclasses import replace

import pytest
import torch
import yaml
from accelerate import Accelerator
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from fastp3o.config import StageConfig
from fastp3o.models.loading import load_policy
from fastp3o.precision import precision_of
from fastp3o.training.checkpoints import load_state, move_into_place, prepare_output_dir, save_model, save_state
from fastp3o.training.optimizer import Optimizer


@pytest.fixture
def accelerator() -> Accelerator:
    return Accelerator(cpu=True)


def config(folder, **changes) -> StageConfig:
    return StageConfig(model="some/model", output_dir=str(folder / "run"), **changes)


def test_a_new_run_writes_its_configuration(accelerator, tmp_path):
    folder = prepare_output_dir(accelerator, config(tmp_path, seed=7))
    written = yaml.safe_load((folder / "config.yaml").read_text())
    assert (written["model"], written["seed"]) == ("some/model", 7)
    assert "limit" not in written  # what is None stands nowhere, so that the file can be given as one of flags


def test_a_folder_with_a_run_needs_resume_and_resume_needs_a_state(accelerator, tmp_path):
    folder = prepare_output_dir(accelerator, config(tmp_path))
    with pytest.raises(FileExistsError, match="continue it with --resume, or name another --output_dir"):
        prepare_output_dir(accelerator, config(tmp_path))
    with pytest.raises(FileNotFoundError, match="there is no state in"):
        prepare_output_dir(accelerator, config(tmp_path, resume=True))
    (folder / "state").mkdir()
    assert prepare_output_dir(accelerator, config(tmp_path, resume=True)) == folder


def test_resuming_says_what_has_changed(accelerator, tmp_path, capsys):
    before = config(tmp_path)
    (prepare_output_dir(accelerator, before) / "state").mkdir()
    prepare_output_dir(accelerator, replace(before, learning_rate=0.5, resume=True))
    printed = capsys.readouterr().out
    assert printed == "resuming with another learning_rate: 1e-05 before, 0.5 now\n"


def test_a_saved_model_is_what_transformers_loads(accelerator, tmp_path, tiny_model, tokenizer):
    policy = load_policy(tiny_model)
    with torch.no_grad():
        policy.head().weight.mul_(2)
    save_model(accelerator, policy, tokenizer, tmp_path / "model")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert all(torch.equal(weight, loaded.state_dict()[name]) for name, weight in policy.model.state_dict().items())
    assert AutoTokenizer.from_pretrained(tmp_path / "model").eos_token == tokenizer.eos_token
    assert not list(tmp_path.glob("*.unfinished"))


def test_a_state_brings_back_optimizer_and_step(accelerator, tmp_path):
    layer = nn.Linear(2, 1)
    optimizer = Optimizer(accelerator, layer, precision_of("fp32", "fp32"), config(tmp_path), steps=9)
    optimizer.backward(layer(torch.ones(2)).sum())
    optimizer.step(torch.zeros(()))
    save_state(accelerator, optimizer, tmp_path / "state", 5)
    expected = copy.deepcopy(optimizer.state_dict())
    for value in optimizer.optimizer.state[layer.weight].values():
        value.zero_()
    layer.weight.data.zero_()
    assert load_state(accelerator, optimizer, tmp_path / "state") == 5
    state = optimizer.state_dict()
    assert torch.equal(state["weights"]["weight"], expected["weights"]["weight"])
    assert all(
        torch.equal(value, expected["moments"]["weight"][name]) for name, value in state["moments"]["weight"].items()
    )
    assert json.loads((tmp_path / "state" / "progress.json").read_text()) == {"step": 5}


def test_a_folder_is_replaced_whole(accelerator, tmp_path):
    for name in ("first", "second"):
        unfinished = tmp_path / "state.unfinished"
        unfinished.mkdir()
        (unfinished / name).touch()
        move_into_place(accelerator, unfinished, tmp_path / "state")
        assert [path.name for path in (tmp_path / "state").iterdir()] == [name]
    assert [path.name for path in tmp_path.iterdir()] == ["state"]
