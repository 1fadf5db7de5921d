"""Hashes of what a configuration names: data, models, reward functions. Names stay, contents change.

A fingerprint has the name of its option, with the name itself behind it where an option has several; that of a reward
function ends in ` function`.
"""

import hashlib
import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers.utils import CONFIG_NAME, cached_file

from fastp3o.rewards.names import is_endpoint, is_function, reward_names

MODELS = ("model", "reference", "reward", "gold_reward")
FUNCTION = " function"
BEHIND_A_URL = "endpoint"  # all that is known of its content: a service may move to another host

# Weights are read in places: a model that was trained on differs in all of them.
BLOCKS, BLOCK_BYTES = 64, 2**16


def fingerprints_of(config: Any, data: Mapping[str, Dataset | None]) -> dict[str, str]:
    """Of the data sets, by the option that names them, and of the models and reward functions of a configuration."""
    fingerprints = {name: examples._fingerprint for name, examples in data.items() if examples is not None}
    for option in MODELS:
        names = names_in(config, option)
        for name in names:
            key = option if len(names) == 1 else f"{option} {name}"
            if is_function(name):
                fingerprints[key + FUNCTION] = of_function(name)
            else:
                fingerprints[key] = BEHIND_A_URL if is_endpoint(name) else of_model(name)
    return fingerprints


def names_in(config: Any, option: str) -> list[str]:
    """Of the models and functions that an option names."""
    given = getattr(config, option, None)
    return reward_names(given) if given and option == "reward" else [given] if given else []


def of_model(name: str) -> str:
    """Of the weights and the configuration in a folder, or in the cache of a hub model."""
    folder = Path(name) if os.path.isdir(name) else Path(str(cached_file(name, CONFIG_NAME))).parent
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if path.suffix == ".safetensors" or path.name in (CONFIG_NAME, "adapter_config.json"):
            digest.update(f"{path.name} {path.stat().st_size}\n".encode())
            with path.open("rb") as file:
                for block in range(BLOCKS):
                    file.seek(path.stat().st_size * block // BLOCKS)
                    digest.update(file.read(BLOCK_BYTES))
    return digest.hexdigest()


def of_function(name: str) -> str:
    """Of the source of the function's module; nothing for one without a source file."""
    module = importlib.util.find_spec(name.partition(":")[0])
    source = Path(module.origin) if module is not None and module.origin is not None else None
    return hashlib.sha256(source.read_bytes() if source is not None and source.is_file() else b"").hexdigest()
