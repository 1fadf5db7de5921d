"""What the name of a checkpoint refers to, and its files, which are downloaded from the hub if the
name is not a folder.

Errors name the checkpoint and the broken file.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, PretrainedConfig
from transformers.utils import (
    ADAPTER_CONFIG_NAME,
    ADAPTER_SAFE_WEIGHTS_NAME,
    CONFIG_NAME,
    GENERATION_CONFIG_NAME,
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    cached_file,
    find_adapter_config_file,
)
from transformers.utils.hub import get_checkpoint_shard_files

from fastp3o.errors import UserError
from fastp3o.sources import HubRef, InMemory, ModelSource, revised

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
)


# --- names ----------------------------------------------------------------------------------------


def at(name: ModelSource) -> dict[str, Any]:
    """The keyword argument of hub functions that selects the revision of a name."""
    return {"revision": name.revision} if isinstance(name, HubRef) else {}


def base_model_name(name: ModelSource) -> ModelSource:
    """The model that LoRA adapters belong to; a model without adapters is its own base."""
    if isinstance(name, InMemory):
        return name
    with errors_naming(name):
        if find_adapter_config_file(str(name), **at(name)) is None:
            return name
        from peft import PeftConfig

        config = PeftConfig.from_pretrained(str(name), **at(name))
        base: ModelSource = config.base_model_name_or_path or ""
        if not base:
            raise UserError("its adapter_config.json names no base model (base_model_name_or_path)")
        if no_such_folder(str(base)):
            raise UserError(
                f"its adapter_config.json names the base model {base}, and there is no such folder"
            )
        if not Path(str(base)).exists():
            base = revised(str(base), config.revision)
        if find_adapter_config_file(str(base), **at(base)) is not None:
            raise UserError(
                f"its adapter_config.json names the base model {base}, which is itself an adapter"
            )
        return base


def load_config(name: ModelSource, trust_remote_code: bool, **settings: Any) -> PretrainedConfig:
    """The configuration of a checkpoint. settings: values that replace its own."""
    if isinstance(name, InMemory):
        return name.value.config(**settings)
    base = base_model_name(name)
    return AutoConfig.from_pretrained(
        str(base), trust_remote_code=trust_remote_code, **at(base), **settings
    )


def gguf_file(path: Path) -> Path | None:
    """The GGUF file that a path is, or the first of a folder that has no weights in another form."""
    if path.is_file():
        return path if path.suffix == ".gguf" else None
    return None if any(path.glob("*.safetensors")) else min(path.glob("*.gguf"), default=None)


def converted(gguf: Path) -> str:
    """How to make a model of a GGUF file, for an error: transformers reads and dequantizes it with
    the package gguf.
    """
    file = f"{str(gguf.parent)!r}, gguf_file={gguf.name!r}"
    model = f"AutoModelForCausalLM.from_pretrained({file}, quantization_config=GgufConfig(dequantize=True))"
    saved = ".save_pretrained('FOLDER')"
    return (
        "To train from one, install gguf and, with AutoModelForCausalLM and AutoTokenizer of transformers and "
        "GgufConfig of transformers.utils.quantization_config, write it in transformers' layout:\n"
        f"  {model}{saved}\n  AutoTokenizer.from_pretrained({file}){saved}"
    )


def no_such_folder(name: str) -> bool:
    """Whether a name is a path that does not exist and cannot be a hub name either."""
    return not Path(name).exists() and (name.startswith((".", "/", "~")) or name.count("/") > 1)


# --- files ----------------------------------------------------------------------------------------


def weight_files(name: ModelSource) -> list[Path]:
    """The files of a model's weights, or of LoRA adapters without their base; those of a hub model
    are downloaded. Raises ValueError if they are not safetensors: other formats can hold code, and
    loading may run it.
    """
    whole = base_model_name(name) == name
    for file in (
        (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME) if whole else (ADAPTER_SAFE_WEIGHTS_NAME,)
    ):
        path = cached_file(str(name), file, _raise_exceptions_for_missing_entries=False, **at(name))
        if path is not None:
            whole_file = file != SAFE_WEIGHTS_INDEX_NAME
            files = (
                [path] if whole_file else get_checkpoint_shard_files(str(name), path, **at(name))[0]
            )
            return [Path(file) for file in files]
    raise UserError(
        "it has no weights in safetensors, and other formats, which can hold code, are not loaded"
    )


def dtypes_of_floats(file: Path) -> set[str]:
    """The dtypes of a file of weights. Raises ValueError for integer weights: transformers would
    load quantized ones without their scales.
    """
    with safe_open(file, framework="pt") as weights:
        dtypes = {key: weights.get_slice(key).get_dtype() for key in weights.keys()}  # noqa: SIM118
        for key, dtype in dtypes.items():
            if key.endswith(".weight") and not dtype.startswith(("F", "BF")):
                raise UserError(f"{file} has {key} in {dtype}; quantized weights are not loaded")
        return set(dtypes.values())


def has_tokenizer(name: ModelSource) -> bool:
    """Whether there are tokenizer files. Without them transformers invents an empty tokenizer for
    some models.
    """
    return any(has_file(name, file) for file in TOKENIZER_FILES)


def has_file(name: ModelSource, file: str) -> bool:
    return (
        cached_file(str(name), file, _raise_exceptions_for_missing_entries=False, **at(name))
        is not None
    )


# --- errors ---------------------------------------------------------------------------------------


@contextmanager
def errors_naming(name: ModelSource) -> Iterator[None]:
    """Turns errors of transformers, safetensors and the hub, which have no common base class, into
    a one-line ValueError that names the model and, if a file of weights is broken, that file.
    """
    path = Path(str(name))
    if gguf := gguf_file(path):
        raise UserError(
            f"cannot load {name}: GGUF files hold rounded weights for inference. {converted(gguf)}"
        )
    if path.is_file():
        raise UserError(f"cannot load {name}: it is a file, and models are folders")
    if no_such_folder(str(name)) and not isinstance(name, InMemory):
        raise UserError(f"cannot load {name}: there is no such folder")
    try:
        yield
    except UserError as error:
        if str(error).startswith(f"cannot load {name}: "):
            raise
        raise UserError(f"cannot load {name}: {error}") from error
    except Exception as error:
        # A KeyError says no more than the key.
        key = isinstance(error, KeyError)
        reason = (
            f"its JSON files lack {error}, or name it and transformers does not know it"
            if key
            else error
        )
        raise UserError(f"cannot load {name}: {broken_file(path) or reason}") from error


def broken_file(folder: Path) -> str | None:
    """Describes the first file of a model that cannot be read, since errors of transformers or
    safetensors may not name it; None if all can.
    """
    settings = (
        CONFIG_NAME,
        ADAPTER_CONFIG_NAME,
        GENERATION_CONFIG_NAME,
        "tokenizer_config.json",
        "tokenizer.json",
    )
    for file in (*sorted(folder.glob("*.safetensors")), *(folder / name for name in settings)):
        try:
            if file.suffix == ".safetensors":
                file.open("rb").close()  # safetensors takes a file that it may not read for none
                with safe_open(file, framework="pt"):
                    continue
            content = json.loads(file.read_bytes()) if file.exists() else {}
            if not isinstance(content, dict):
                return f"{file} must hold a JSON object, got a {type(content).__name__}"
        except (OSError, ValueError, SafetensorError) as error:
            return f"{file} cannot be read: {error}"
    return None
