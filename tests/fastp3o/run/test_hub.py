"""Uploads to a local stand-in of the hub, by huggingface_hub's own requests."""

import base64
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from fastp3o.run.hub import HubError, plain_errors
from fastp3o.training import sft
from fastp3o.training.config import SFTConfig
from tests.fastp3o.local_server import LocalHandler, LocalServer
from tests.fastp3o.run.faults.injection import fork_together, wait_together

WRITES, READS = "hf_writes0123456789", "hf_reads0123456789"


class Hub(LocalServer):
    """repositories: files by repository. private: those made so. refused: statuses and messages, by
    ends of paths.
    """

    def __init__(self) -> None:
        super().__init__(Handler)
        self.repositories: dict[str, dict[str, bytes]] = {}
        self.private: set[str] = set()
        self.refused: dict[str, tuple[int, str]] = {}
        self.commits = 0


class Handler(LocalHandler):
    server: Hub

    def respond(self, sent: bytes) -> None:
        path = self.path.partition("?")[0]
        self.server.requests.append(path)
        status, content = self.answer_to(path, [json.loads(line) for line in sent.splitlines()])
        about = {"Content-Type": "application/json", "X-Error-Message": content.get("error", "")}
        self.answer(status, content, **about)

    def answer_to(self, path: str, lines: list[dict]) -> tuple[int, dict]:
        """lines: of the body, which has several in a commit."""
        hub, token = self.server, self.headers.get("Authorization", "").removeprefix("Bearer ")
        for end, (status, message) in hub.refused.items():
            if path.endswith(end):
                return status, {"error": message}
        if path == "/api/validate-yaml":
            return 200, {"errors": [], "warnings": []}
        if path == "/api/repos/create":
            name = f"{lines[0]['organization'] or 'me'}/{lines[0]['name']}"
            if token == WRITES:
                hub.repositories.setdefault(name, {})
            if lines[0].get("visibility") == "private" or lines[0].get("private"):
                hub.private.add(name)
            known = name in hub.repositories
            return 200 if known else 403, {"url": f"{hub.url}/{name}", "name": name, "id": name}
        if token != WRITES:
            return 403, {"error": f"You have no write access, Bearer {token}"}
        owner, name, what = path.removeprefix("/api/models/").split("/")[:3]
        if what == "preupload":
            plain = {"uploadMode": "regular", "shouldIgnore": False}
            return 200, {"files": [{"path": file["path"]} | plain for file in lines[0]["files"]]}
        if what == "commit":
            hub.commits += 1
            sent = {
                line["value"]["path"]: base64.b64decode(line["value"]["content"])
                for line in lines[1:]
            }
            hub.repositories[f"{owner}/{name}"] |= sent
        return 200, {
            "success": True,
            "commitOid": "0" * 40,
            "commitUrl": f"{hub.url}/{owner}/{name}/commit/0",
        }


SETTINGS = {
    "train_data": "sft.jsonl",
    "batch_size": 8,
    "max_response_tokens": 20,
    "report_to": "none",
}
SETTINGS |= {"precision": "fp32", "push_to_hub": "me/tiny", "output_dir": "run"}


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setenv("HF_TOKEN", WRITES)
    with Hub() as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        yield server


def train(model: str, **changes) -> None:
    sft.train(SFTConfig(**(SETTINGS | {"model": model} | changes)))


def saved(folder: str) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def test_the_finished_model_is_uploaded_with_its_adapter(workplace, tiny_model, server, capsys):
    train(tiny_model, lora_rank=2, save_every=1)
    files = server.repositories["me/tiny"]
    model, adapter = saved("run/model"), saved("run/adapter")
    assert files.keys() == {*model, *(f"adapter/{name}" for name in adapter)}
    assert all(files[name] == content for name, content in model.items())
    changed = {name for name, content in adapter.items() if files[f"adapter/{name}"] != content}
    assert changed == {"adapter_config.json"}
    uploaded, own = (
        json.loads(files["adapter/adapter_config.json"]),
        json.loads(adapter["adapter_config.json"]),
    )
    assert own["base_model_name_or_path"] == tiny_model
    assert uploaded == own | {"base_model_name_or_path": Path(tiny_model).name}
    assert not any(str(Path(tiny_model).parent).encode() in content for content in files.values())
    assert server.commits == 1
    assert server.private == set()
    output = capsys.readouterr()
    assert f"the model is at {server.url}/me/tiny" in output.out
    assert WRITES not in output.out + output.err


def test_an_adapter_alone_is_the_repository(workplace, tiny_model, server):
    train(tiny_model, lora_rank=2, lora_save="adapter", push_to_hub="tiny", hub_private=True)
    assert server.repositories["me/tiny"].keys() == saved("run/adapter").keys()
    assert server.private == {"me/tiny"}


@pytest.mark.parametrize(
    ("token", "name", "says"),
    [
        (None, "me/tiny", "needs a token of the hub: run `hf auth login`, or set"),
        (READS, "me/new", "the hub cannot be written to: .*40[13]"),
        (READS, "me/tiny", "the hub cannot be written to: .*40[13]"),
        (WRITES, "a/b/c", "the hub cannot be written to: "),
        (WRITES, "no spaces", "the hub cannot be written to: "),
    ],
)
def test_nothing_is_trained_that_cannot_be_uploaded(
    workplace, tiny_model, server, monkeypatch, token, name, says
):
    server.repositories["me/tiny"] = {}
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", "none")
    if token:
        monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(HubError, match=f"--push_to_hub {name}.* {says}") as caught:
        train(tiny_model, push_to_hub=name)
    assert READS not in str(caught.value)
    assert "\n" not in str(caught.value)
    assert token or server.requests == []
    assert not Path("run").exists()


def test_a_failed_upload_loses_nothing(workplace, tiny_model, server, monkeypatch):
    server.refused["/commit/main"] = (413, f"too large for {WRITES}")
    said = "the run is finished, and its model is in run/model, but not on the hub"
    with pytest.raises(HubError, match=said) as caught:
        train(tiny_model)
    assert "`hf upload me/tiny run/model`" in str(caught.value)
    assert "too large for ..." in str(caught.value)
    assert WRITES not in str(caught.value)
    before = saved("run/model")
    server.refused.clear()
    train(tiny_model, resume=True)
    assert saved("run/model") == before == server.repositories["me/tiny"]


def test_two_processes_upload_once(workplace, tiny_model, server):
    logs = [Path("first.txt"), Path("second.txt")]
    statuses = wait_together(fork_together(lambda: train(tiny_model, lora_rank=2), logs))
    said = "".join(log.read_text() for log in logs)
    assert statuses == [0, 0], said
    assert said.count(f"the model is at {server.url}/me/tiny") == 1
    assert server.commits == 1
    assert {"model.safetensors", "adapter/adapter_model.safetensors"} <= server.repositories[
        "me/tiny"
    ].keys()


def test_a_reason_that_an_error_and_its_cause_share_is_said_once():
    with pytest.raises(HubError, match=r"^no hub: name unknown$"), plain_errors("no hub"):
        raise OSError("name unknown") from OSError("name unknown")
