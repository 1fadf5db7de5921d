"""Reading a checkpoint: errors name it and its broken file, and its weights must be all of its model's."""

import logging
import warnings
from collections.abc import Iterator, Set
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, GenerationConfig, PretrainedConfig
from transformers.utils import (
    ADAPTER_SAFE_WEIGHTS_NAME,
    GENERATION_CONFIG_NAME,
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    cached_file,
    find_adapter_config_file,
)
from transformers.utils.hub import get_checkpoint_shard_files

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")
NAMED = 3  # weights or tokens in an error
# How settings end that make passes in training mode random: dropout, and the noise of mixtures of experts' routers.
NOISE = ("dropout", "pdrop", "dropout_prob", "layerdrop", "drop", "jitter_noise", "jitter_eps")


def from_checkpoint(model_class: Any, name: str, **options: Any) -> tuple[Any, dict[str, Any]]:
    """A model without dropout or noise of routers, and what transformers says of weights that are missing, unexpected
    or mismatched.
    """
    with errors_naming(name), without_load_report():
        off = noise_off(load_config(name, options["trust_remote_code"]).to_dict())
        if has_file(name, GENERATION_CONFIG_NAME):
            GenerationConfig.from_pretrained(name)  # transformers passes over one that it cannot read
        for each in {name, base_of(name)}:
            weight_files(each)  # transformers would load other formats
        return model_class.from_pretrained(
            name, output_loading_info=True, ignore_mismatched_sizes=True, **off, **options
        )


def without_weights(
    model_class: Any, name: str, *, dtype: torch.dtype, trust_remote_code: bool, **settings: int
) -> Any:
    """The same model on the meta device."""
    with errors_naming(name):
        off = noise_off(load_config(name, trust_remote_code).to_dict())
        config = AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code, **settings, **off)
        with torch.device("meta"):
            return model_class.from_config(config, dtype=dtype, trust_remote_code=trust_remote_code)


def require_whole(
    name: str, loading: dict[str, Any], *, may_lack: Set[str] = frozenset(), may_exceed: Set[str] = frozenset()
) -> None:
    """Raises ValueError where weights of the checkpoint are not those of the model: random ones would stand in."""
    mismatched = {key: f"{key} {list(found)} instead of {list(own)}" for key, found, own in loading["mismatched_keys"]}
    problems = {
        "lacks": sorted(set(loading["missing_keys"]) - may_lack),
        "also has": sorted(set(loading["unexpected_keys"]) - may_exceed),
        "has in another size": list(mismatched.values()),
    }
    if any(problems.values()):
        said = "; it ".join(f"{what} {listed(keys)}" for what, keys in problems.items() if keys)
        raise ValueError(f"the checkpoint {name} does not hold the weights of its model: it {said}")


def with_adapters(model: Any, name: str) -> Any:
    """The model with LoRA adapters. Raises ValueError where some are missing, of which peft only warns."""
    from peft import PeftModel

    with errors_naming(name), warnings.catch_warnings():
        warnings.filterwarnings("error", message="Found missing adapter keys")
        weight_files(name)  # peft would load other formats
        return PeftModel.from_pretrained(model, name)


def base_of(name: str) -> str:
    """The model under LoRA adapters; where there are none, the model itself."""
    with errors_naming(name):
        if find_adapter_config_file(name) is None:
            return name
        from peft import PeftConfig

        return PeftConfig.from_pretrained(name).base_model_name_or_path


def weight_files(name: str) -> list[Path]:
    """The files of a model's weights, or of LoRA adapters alone; those of a hub model are downloaded.

    Raises ValueError where they are not safetensors: other formats can hold code, and loading may run it.
    """
    for file in (ADAPTER_SAFE_WEIGHTS_NAME,) if base_of(name) != name else (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME):
        found = cached_file(name, file, _raise_exceptions_for_missing_entries=False)
        if found is not None:
            shards = get_checkpoint_shard_files(name, found)[0] if file == SAFE_WEIGHTS_INDEX_NAME else [found]
            return [Path(shard) for shard in shards]
    raise ValueError("it has no weights in safetensors, and other formats, which can hold code, are not loaded")


def load_config(name: str, trust_remote_code: bool) -> PretrainedConfig:
    return AutoConfig.from_pretrained(base_of(name), trust_remote_code=trust_remote_code)


def has_tokenizer(name: str) -> bool:
    """transformers makes up an empty tokenizer for some models without one."""
    return any(has_file(name, file) for file in TOKENIZER_FILES)


def has_file(name: str, file: str) -> bool:
    return cached_file(name, file, _raise_exceptions_for_missing_entries=False) is not None


@contextmanager
def errors_naming(name: str) -> Iterator[None]:
    """Turns what transformers, safetensors and the hub raise, which share no base class, into a ValueError in one line
    that names the model and, where one is broken, the file of weights.
    """
    path = Path(name)
    if path.is_file():
        raise ValueError(f"cannot load {name}: it is a file, and models are folders")
    if not path.exists() and (name.startswith((".", "/", "~")) or name.count("/") > 1):
        raise ValueError(f"cannot load {name}: there is no such folder")  # nor can it be a hub name
    try:
        yield
    except Exception as error:
        raise ValueError(f"cannot load {name}: {broken_weights(path) or error}") from error


def broken_weights(folder: Path) -> str | None:
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt"):
                pass
        except (SafetensorError, OSError) as error:
            return f"{file} is not whole: {error}"
    return None


def listed(names: list[str]) -> str:
    """The first few names and the number of the others."""
    more = len(names) - NAMED
    return ", ".join(names[:NAMED]) + (f" and {more} more" if more > 0 else "")


@contextmanager
def without_load_report() -> Iterator[None]:
    """Leaves out transformers' table of missing and unexpected weights: what matters of it is an error."""
    logger = logging.getLogger("transformers.modeling_utils")
    logger.addFilter(is_no_load_report)
    try:
        yield
    finally:
        logger.removeFilter(is_no_load_report)


def is_no_load_report(record: logging.LogRecord) -> bool:
    return "LOAD REPORT" not in record.getMessage()


def noise_off(config: dict[str, Any]) -> dict[str, Any]:
    """Zero for every probability of dropout and every noise of routing that a model's configuration has, also in parts
    of it, which are given whole.
    """
    off: dict[str, Any] = {}
    for key, value in config.items():
        # PhiMoE's routers take it for a threshold in evaluation, too, so without it this would be another model.
        if (config.get("model_type"), key) == ("phimoe", "router_jitter_noise"):
            continue
        if isinstance(value, float) and key.endswith(NOISE):
            off[key] = 0.0
        elif isinstance(value, dict) and (inside := noise_off(value)):
            off[key] = value | inside
    return off
