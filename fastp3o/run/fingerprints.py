"""Hashes of the data, models and reward functions that a configuration names, since contents change
under a name.

A fingerprint has the name of its option, behind it the model's if there are several; a function's
ends in ` function`: a resumed run says that it changed, and goes on. An objective's does not:
another loss is another run.
"""

import hashlib
import importlib.util
import json
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from datasets import Dataset
from huggingface_hub import constants, snapshot_download
from transformers.utils import ADAPTER_CONFIG_NAME, CONFIG_NAME, GENERATION_CONFIG_NAME

from fastp3o.calls.function import import_function, is_file
from fastp3o.models.checkpoint_files import (
    TOKENIZER_FILES,
    at,
    base_model_name,
    errors_naming,
    weight_files,
)
from fastp3o.rewards.config import (
    ENVIRONMENT,
    cascaded,
    is_endpoint,
    is_function,
    is_judge,
    reward_names,
)
from fastp3o.run.code import code_fingerprint
from fastp3o.sources import InMemory, ModelSource, revised

MODELS = ("model", "reference", "rival", "reward", "gold_reward")
TEXTS = ("prefix", "principles", "judge_principles", "judge_template")  # files
FUNCTION = " function"
ENDPOINT = "endpoint"  # of every endpoint: a service may move to another host

TOKENS = (
    *TOKENIZER_FILES,
    "merges.txt",
    "added_tokens.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)
SETTINGS, CODE = (CONFIG_NAME, GENERATION_CONFIG_NAME, ADAPTER_CONFIG_NAME, *TOKENS), "*.py"

# This much of each tensor is read: reading all would take as long as loading, and a step moves most
# of a tensor.
BLOCK_BYTES = 2**16


def run_fingerprints(
    options: Mapping[str, Any], data: Mapping[str, Dataset | None]
) -> dict[str, str]:
    """The fingerprints of data sets, by the option that names them, and of the models and functions
    that options name.

    options: the values of a configuration by name, with objects where it has some (`Flags.values`).
    """
    fingerprints = {
        name: examples._fingerprint for name, examples in data.items() if examples is not None
    }
    if environment := options.get("environment"):
        fingerprints["environment" + FUNCTION] = function_fingerprint(str(environment))
    for tool in str(options.get("tools") or "").split(","):
        if tool:
            fingerprints[f"tools {tool.strip()}{FUNCTION}"] = function_fingerprint(tool.strip())
    objective = options.get("objective", "")
    if isinstance(objective, InMemory):
        fingerprints["objective"] = code_fingerprint(objective.value)
    elif is_function(objective):
        fingerprints["objective"] = code_fingerprint(import_function(objective, "objective"))
    for option in TEXTS:
        if path := options.get(option):
            fingerprints[option] = hashlib.sha256(Path(path).read_bytes()).hexdigest()
    for option in MODELS:
        names = names_in(options, option)
        for name in (name for name in names if name != ENVIRONMENT or not environment):
            key = option if len(names) == 1 else f"{option} {name}"
            if is_judge(name) and options.get("judge_model"):
                fingerprints[key] = (
                    ENDPOINT
                    if options.get("judge_url")
                    else model_fingerprint(options["judge_model"])
                )
            elif is_function(str(name)):
                fingerprints[key + FUNCTION] = function_fingerprint(str(name))
            else:
                fingerprints[key] = ENDPOINT if is_endpoint(str(name)) else model_fingerprint(name)
    return fingerprints


def names_in(options: Mapping[str, Any], option: str) -> list[ModelSource]:
    """The models and functions that an option names."""
    value = options.get(option)
    if option == "model" and value:
        return [revised(value, options.get("model_revision"))]
    names = reward_names(value) if value and option == "reward" else [value] if value else []
    return [single for name in names for single in cascaded(name)]


def model_fingerprint(name: ModelSource) -> str:
    """The hash of the weights, settings, tokenizer and code of a folder or hub model. LoRA adapters
    include their base model. Raises ValueError if one of them cannot be read.

    A block of every tensor is read, or all of a smaller one. Training that moves only other parts
    of a large tensor, such as single rows of an embedding, goes unnoticed. So does a change of code
    in another hub model.
    """
    if isinstance(name, InMemory):
        return name.value.fingerprint()
    digest = hashlib.sha256()
    with errors_naming(name):
        # All of these are downloaded from the hub, so that the hash does not depend on what was
        # loaded before.
        wanted = {
            "allow_patterns": [*SETTINGS, CODE],
            "local_files_only": constants.HF_HUB_OFFLINE,
            **at(name),
        }
        folder = str(name) if os.path.isdir(str(name)) else snapshot_download(str(name), **wanted)
        settings = sorted(
            path for path in Path(folder).iterdir() if path.name in SETTINGS or path.match(CODE)
        )
        for path in settings:
            digest.update(f"{path.name} {path.stat().st_size}\n".encode() + path.read_bytes())
        for path in weight_files(name):
            digest.update(f"{path.name} {path.stat().st_size}\n".encode())
            for part in header_and_blocks(path):
                digest.update(part)
    base = base_model_name(name)
    if base != name:
        digest.update(model_fingerprint(base).encode())
    return digest.hexdigest()


def header_and_blocks(path: Path) -> Iterator[bytes]:
    """A safetensors file's header, with names, dtypes, shapes and offsets, and the middle of each
    tensor.
    """
    with path.open("rb") as file:
        length = file.read(8)
        header = file.read(int.from_bytes(length, "little"))
        yield length + header
        start = file.tell()
        for name, tensor in json.loads(header).items():
            if name != "__metadata__":
                first, end = tensor["data_offsets"]
                size = min(BLOCK_BYTES, end - first)
                file.seek(start + first + (end - first - size) // 2)
                yield file.read(size)


def function_fingerprint(name: str) -> str:
    """The hash of the source of the function's module; of nothing if it has no source file."""
    module = name.partition(":")[0]
    origin: str | None
    if is_file(name):
        origin = module
    elif module in sys.modules:  # a notebook or a program has no other way to its own module
        origin = getattr(sys.modules[module], "__file__", None)
    else:
        spec = importlib.util.find_spec(module)
        origin = None if spec is None else spec.origin
    source = None if origin is None else Path(origin)
    return hashlib.sha256(
        source.read_bytes() if source is not None and source.is_file() else b""
    ).hexdigest()
