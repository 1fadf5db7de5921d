"""Uploads a finished model, and its adapter, to the Hugging Face Hub.

The token, which is huggingface_hub's (HF_TOKEN, or `hf auth login`), is tried before training, and
never printed.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub import CommitOperationAdd, HfApi, get_token
from transformers.utils import ADAPTER_CONFIG_NAME

from fastp3o.config import TrainingRunConfig
from fastp3o.errors import UserError
from fastp3o.files import from_here
from fastp3o.run.names import ADAPTER, FINISHED_MODEL


class HubError(UserError):
    """The hub cannot be written to, or did not take a model."""


def require_repository(config: TrainingRunConfig) -> None:
    """Makes the repository that the configuration names, if it names one and it is not there.
    Raises HubError if there is no token, or if it must not write there.
    """
    name = config.push_to_hub
    if name is None:
        return
    if get_token() is None:
        raise HubError(
            f"--push_to_hub {name} needs a token of the hub: run `hf auth login`, or set HF_TOKEN"
        )
    with plain_errors(f"--push_to_hub {name}: the hub cannot be written to"):
        repository(config)


def repository(config: TrainingRunConfig) -> str:
    """The whole name of the repository, which is made if it is not there. The token may write to
    it.
    """
    assert config.push_to_hub is not None
    api = HfApi()
    name = api.create_repo(
        config.push_to_hub, private=config.hub_private or None, exist_ok=True
    ).repo_id
    # Making a repository that is there succeeds without the right to write to it.
    api.auth_check(name, write=True)
    return name


def upload(folder: Path, config: TrainingRunConfig) -> str | None:
    """Uploads the finished model of the run in `folder` as the configuration says, in one commit:
    `model/`, with `adapter/` inside; or the adapter alone. Returns the address; None if no upload
    is asked for. Raises HubError, which says how to do it again.
    """
    if config.push_to_hub is None:
        return None
    model, adapter = (folder / name for name in (FINISHED_MODEL, ADAPTER))
    root = model if model.exists() else adapter
    shown = from_here(root)
    again = (
        f"`hf upload {config.push_to_hub} {shown}`, or the run's command with --resume, tries again"
    )
    with plain_errors(
        f"the run is finished, and its model is in {shown}, but not on the hub; {again}"
    ):
        name = repository(config)
        files = {path.name: path for path in root.iterdir()}
        if root == model and adapter.exists():
            files |= {f"{ADAPTER}/{path.name}": path for path in adapter.iterdir()}
        operations = [CommitOperationAdd(place, content(files[place])) for place in sorted(files)]
        return (
            HfApi().create_commit(name, operations, commit_message="Upload by fastp3o").repo_url.url
        )


def content(path: Path) -> Path | bytes:
    """A file as it is uploaded: an adapter's configuration without the path of a local base."""
    if path.name != ADAPTER_CONFIG_NAME:
        return path
    config = json.loads(path.read_text())
    if (base := Path(config["base_model_name_or_path"])).is_absolute():
        config["base_model_name_or_path"] = base.name
    return json.dumps(config, indent=2).encode()


@contextmanager
def plain_errors(what: str) -> Iterator[None]:
    """Turns errors of the hub, the network and the storage, which share no base class, into a
    HubError in one line.
    """
    try:
        yield
    except Exception as error:
        reasons = [
            " ".join(str(cause).split()) for cause in (error, error.__cause__) if cause is not None
        ]
        reason = ": ".join(filter(None, dict.fromkeys(reasons))) or type(error).__name__
        token = get_token()
        raise HubError(f"{what}: {reason.replace(token, '...') if token else reason}") from None
