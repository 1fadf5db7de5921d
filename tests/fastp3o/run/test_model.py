import os
import resource

import pytest
import torch
from accelerate import Accelerator

from fastp3o.models.loading import load_policy
from fastp3o.models.save import KeptOnDisk, save_model
from tests.fastp3o.run.faults.injection import in_child


@pytest.fixture
def accelerator() -> Accelerator:
    return Accelerator(cpu=True)


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_all_files_of_a_model_have_one_mode(accelerator, tmp_path, tiny_model, tokenizer, umask):
    before = os.umask(umask)
    try:
        save_model(accelerator, load_policy(tiny_model), tokenizer, tmp_path / "model")
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "model").iterdir()}
    assert set(modes.values()) == {0o666 & ~umask}, modes


def test_a_model_that_cannot_be_written_leaves_the_one_before(
    accelerator, tmp_path, tiny_model, tokenizer, monkeypatch
):
    policy = load_policy(tiny_model)
    save_model(accelerator, policy, tokenizer, tmp_path / "model")
    before = {path.name: path.read_bytes() for path in (tmp_path / "model").iterdir()}

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(type(tokenizer), "save_pretrained", full)
    with torch.no_grad():
        policy.head().weight.mul_(2)
    with pytest.raises(OSError, match=f"No space left on device: '{tmp_path}/model'"):
        save_model(accelerator, policy, tokenizer, tmp_path / "model")
    assert {path.name: path.read_bytes() for path in (tmp_path / "model").iterdir()} == before
    assert os.listdir(tmp_path) == ["model"]


def test_gathered_weights_that_a_full_disk_has_no_room_for_are_an_error(tmp_path):
    """Runs in a child process, since the limit stays."""

    def gather() -> None:
        kept = KeptOnDisk(tmp_path / "gathered", drop=False)
        weights = [torch.arange(n, dtype=torch.bfloat16).reshape(2, -1) for n in (10, 10_000, 10)]
        copies = [kept(weight) for weight in weights]
        assert torch.equal(copies[0], weights[0])
        assert [copy.numel() for copy in copies[1:]] == [0, 0]
        kept.require_written()

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))

    assert in_child(gather, tmp_path / "log.txt", limit) == 1
    assert (tmp_path / "log.txt").read_text().endswith("OSError: [Errno 27] File too large\n")
