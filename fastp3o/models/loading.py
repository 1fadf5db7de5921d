"""Tokenizers and models from checkpoints: a folder or a hub name. Broken or incomplete ones are refused.

Only the main process loads weights; the others have their models on the meta device, for `shard`.
"""

import copy
import json
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from math import isfinite
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GenerationConfig,
    PretrainedConfig,
)
from transformers import PreTrainedTokenizerBase as Tokenizer
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

from fastp3o.config import Named, Revised
from fastp3o.errors import UserError
from fastp3o.files import read_text
from fastp3o.models.load_report import listed, require_whole, without_report
from fastp3o.models.merging import ADAPTER
from fastp3o.models.overflow import Overflow, OverflowsError
from fastp3o.models.packable import PROMPTS, TOLERANCE, require_packable, require_trainable, within_vocabulary
from fastp3o.models.packed_model import PackedModel
from fastp3o.models.quantized import checked, quantized_loading
from fastp3o.models.sharding import computed_in, is_main_process, number_of_processes

CPU = torch.device("cpu")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")
HALF = {"BF16": torch.bfloat16, "F16": torch.float16}
TRIED = 50  # trained tokens of a trial
# Endings of settings that make passes in training mode random: dropout, and noise of the routers of experts.
NOISE = ("dropout", "pdrop", "dropout_prob", "layerdrop", "drop", "jitter_noise", "jitter_eps")


def load_tokenizer(name: str, *, trust_remote_code: bool = False, chat_template: str | None = None) -> Tokenizer:
    """Loads the tokenizer of a model. chat_template: a file that has another one than its own. Raises ValueError if
    there is none, if the file cannot be read, if it has no end-of-sequence token, as responses could not end, and if it
    has tokens that the model does not have.
    """
    if isinstance(name, Named):
        tokenizer, config = copy.deepcopy(name.content.tokenizer), name.content.model.config
        return usable_tokenizer(name, tokenizer, config, chat_template)
    with errors_naming(name):
        # First: without the network the hub's client tries for half a minute to find each file.
        if not Path(name).is_dir() and not (has_file(name, CONFIG_NAME) or has_file(name, ADAPTER_CONFIG_NAME)):
            raise UserError("it is neither a folder nor in the cache, and the hub cannot be reached (or is off)")
        if not has_tokenizer(name):
            if has_file(name, f"adapter/{ADAPTER_CONFIG_NAME}") and not has_file(name, CONFIG_NAME):
                raise UserError(f"it has an adapter alone: name {name}/adapter")
            raise UserError("no tokenizer files found")
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code, **at(name))
        config = load_config(name, trust_remote_code)
    return usable_tokenizer(name, tokenizer, config, chat_template)


def usable_tokenizer(name: str, tokenizer: Any, config: PretrainedConfig, chat_template: str | None) -> Tokenizer:
    if chat_template:
        tokenizer.chat_template = read_text(chat_template, "chat_template")
    tokens = config.get_text_config().vocab_size
    if tokenizer.eos_token_id is None:
        raise UserError(f"the tokenizer of {name} has no end-of-sequence token; set eos_token in its configuration")
    beyond = sorted((number, token) for token, number in tokenizer.get_vocab().items() if number >= tokens)
    if beyond:
        names = listed([repr(token) for _, token in beyond])
        raise UserError(f"the tokenizer of {name} has tokens that the model's {tokens} embeddings lack: {names}")
    if tokenizer.pad_token_id is None:
        # Padding is masked wherever it is used, so any id serves.
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def require_same_vocabulary(
    reference: str, policy: str, tokenizer: Tokenizer, *, trust_remote_code: bool = False
) -> None:
    """Raises ValueError if a reference gives log-probabilities of other tokens than the policy's. tokenizer: the
    policy's. If the reference has no tokenizer, only the numbers of tokens are compared.
    """
    expected = f"a reference needs the policy's vocabulary, and that of {reference} is not that of {policy}: "
    with errors_naming(reference):
        configs = (load_config(name, trust_remote_code) for name in (reference, policy))
        there, here = (config.get_text_config().vocab_size for config in configs)
        ids = others = tokenizer.get_vocab()
        if has_tokenizer(reference):
            others = AutoTokenizer.from_pretrained(reference, trust_remote_code=trust_remote_code).get_vocab()
    if there != here:
        raise UserError(f"{expected}{there} tokens instead of {here}")
    if differing := sorted({token for token, _ in ids.items() ^ others.items()}):
        raise UserError(f"{expected}{len(differing)} tokens have other ids or none, {listed(differing)}")


def load_policy(
    name: str,
    *,
    device: torch.device = CPU,
    dtype: torch.dtype = torch.float32,
    trust_remote_code: bool = False,
    trains: bool = False,
    as_stored: bool = False,
    quantize: str | None = None,
) -> PackedModel:
    """Loads a causal LM without dropout or router noise: a policy's log-probabilities must not be random. LoRA adapters
    are merged into it. as_stored: for a model that `shard` spreads, half-precision weights of a checkpoint stay in its
    mapped file until then. quantize: bits of its linear layers, 4bit or 8bit.

    Raises ValueError if the checkpoint is incomplete, if the model cannot be run on packed rows, and if a model that
    trains still gives other log-probabilities in training mode.
    """
    base = base_model_name(name)
    quantized = quantized_options(name, base, quantize)
    if not is_main_process():
        model = without_weights(AutoModelForCausalLM, base, dtype=dtype, trust_remote_code=trust_remote_code)
        if isinstance(name, Named):
            name.content.copy_generation_config(model)
        else:
            with suppress(OSError):  # it has none of its own
                model.generation_config = GenerationConfig.from_pretrained(base, **at(base))
        if base != name:
            model = with_adapters(model, name)
        return PackedModel(named(model, name, base))
    options: dict[str, Any] = {"dtype": dtype, "trust_remote_code": trust_remote_code, **quantized}
    model, loading = from_checkpoint(AutoModelForCausalLM, base, as_stored and base == name, **options)
    require_whole(base, loading)
    require_finite_weights(base, model)
    if base != name:
        model = with_adapters(model, name)
    checked(model)
    policy = PackedModel(named(model, name, base)).to(device)
    with computed_in(dtype, policy) if as_stored else nullcontext():
        require_packable(policy, name)
        return require_trainable(policy, name) if trains else policy


def quantized_options(name: str, base: str, quantize: str | None) -> dict[str, Any]:
    """Arguments of loading a quantized model; none without `quantize`."""
    if quantize is not None and base != name:
        raise UserError(f"--quantize needs a whole model, and {name} is an adapter: give the merged one")
    return {} if quantize is None else quantized_loading(quantize)


def named(model: Any, name: str, base: str) -> Any:
    """The model with the name of the checkpoint that holds its weights, none if they have adapters merged."""
    start = name.content.model.name_or_path if isinstance(name, Named) else base
    model.name_or_path = start if base == name else ""
    return model


def load_reward_model(
    name: str,
    *,
    new_head: bool = False,
    device: torch.device = CPU,
    dtype: torch.dtype = torch.float32,
    trust_remote_code: bool = False,
    as_stored: bool = False,
    quantize: str | None = None,
) -> PackedModel:
    """Loads a sequence classifier with one output. LoRA adapters are merged into it; its head may be saved with them.

    new_head: also take a causal LM's checkpoint, which gets a scalar head that starts at zero. as_stored and quantize:
    as for policies; the head is not quantized. Raises ValueError if the checkpoint is incomplete or its head untrained,
    if the model has no linear `score` head over hidden states, or several outputs, and if packed rows cannot run it.
    """
    options: dict[str, Any] = {"dtype": dtype, "trust_remote_code": trust_remote_code, "num_labels": 1}
    base = base_model_name(name)
    if not is_main_process():
        model = without_weights(AutoModelForSequenceClassification, base, **options)
        if base != name:
            model = with_adapters(model, name)
        return PackedModel(named(model, name, base))
    if quantized := quantized_options(name, base, quantize):
        quantized["quantization_config"].llm_int8_skip_modules = ["score"]
    options |= quantized
    model, loading = from_checkpoint(AutoModelForSequenceClassification, base, as_stored and base == name, **options)
    head = getattr(model, "score", None)
    if not isinstance(head, nn.Linear):
        raise UserError(f"{type(model).__name__} ({name}) has no linear head `score`; use a decoder-only reward model")
    outputs = next((shape[0] for key, shape, _ in loading["mismatched_keys"] if key == "score.weight"), 1)
    if outputs != 1:
        raise UserError(f"{name} has {outputs} outputs; a reward model has one")
    headless = "score.weight" in loading["missing_keys"]
    require_whole(base, loading, may_lack={"score.weight", "score.bias"}, may_exceed={"lm_head.weight"})
    require_finite_weights(base, model)
    if headless:
        nn.init.zeros_(head.weight)
    if base != name:
        model = with_adapters(model, name)
        head = model.score
    if not new_head and not head.weight.any():
        lack = "it has no head `score`" if headless else "its head `score` is zero"
        raise UserError(f"{name} is not a trained reward model: {lack}; train one from it with scripts/reward_model.py")
    checked(model)
    scorer = PackedModel(named(model, name, base).to(device))
    with computed_in(dtype, scorer) if as_stored else nullcontext():
        return require_packable(scorer, name)


def from_checkpoint(model_class: Any, name: str, as_stored: bool, **options: Any) -> tuple[Any, dict[str, Any]]:
    """A model without dropout or router noise, and transformers' lists of missing, unexpected, mismatched weights."""
    with errors_naming(name), without_report():
        off = noise_off(load_config(name, options["trust_remote_code"]).to_dict())
        if isinstance(name, Named):
            labels = {"num_labels": options.pop("num_labels")} if "num_labels" in options else {}
            return name.content.copied(model_class, name.content.config(**off, **labels), **options)
        if has_file(name, GENERATION_CONFIG_NAME):
            GenerationConfig.from_pretrained(name, **at(name))  # transformers ignores one that it cannot read
        # First, since transformers would load other formats.
        stored = {dtype for file in weight_files(name) for dtype in dtypes_of_floats(file)}
        dtype = HALF.get(stored.pop()) if as_stored and len(stored) == 1 and number_of_processes() > 1 else None
        loaded = off | options | ({} if dtype is None else {"dtype": dtype})
        reported = {"output_loading_info": True, "ignore_mismatched_sizes": True}
        model, loading = model_class.from_pretrained(name, **reported, **at(name), **loaded)
        built = model if dtype is None else with_weights_of(model, without_weights(model_class, name, **options))
        return built, loading


def without_weights(model_class: Any, name: str, dtype: torch.dtype, trust_remote_code: bool, **settings: int) -> Any:
    """Builds the model of `from_checkpoint` with parameters on the meta device."""
    with errors_naming(name):
        off = noise_off(load_config(name, trust_remote_code).to_dict())
        config = load_config(name, trust_remote_code, **settings, **off)
        with init_empty_weights(include_buffers=False):
            model = model_class.from_config(config, dtype=dtype, trust_remote_code=trust_remote_code)
        model.tie_weights()  # which this has parted
        return model


def with_weights_of(loaded: Any, built: Any) -> Any:
    """A model as it was built, whose buffers have that dtype, with the weights as they were loaded, in theirs."""
    for place, module in loaded.named_modules():
        built.get_submodule(place)._parameters.update(module._parameters)
    saved = loaded.state_dict()
    for name, buffer in built.named_buffers():
        buffer.copy_(saved.get(name, buffer))
    if built.can_generate():
        built.generation_config = loaded.generation_config
    return built.eval()


def noise_off(config: dict[str, Any]) -> dict[str, Any]:
    """Settings that turn off all dropout and router noise. Nested configurations that have any are given whole."""
    off: dict[str, Any] = {}
    for key, value in config.items():
        # PhiMoE's routers also take it as a threshold in evaluation, so without it this would be another model.
        if (config.get("model_type"), key) == ("phimoe", "router_jitter_noise"):
            continue
        if isinstance(value, float) and key.endswith(NOISE):
            off[key] = 0.0
        elif isinstance(value, dict) and (inside := noise_off(value)):
            off[key] = value | inside
    return off


def require_finite_weights(name: str, model: nn.Module) -> None:
    """Raises ValueError for weights that are NaN or infinite, also where no token of a trial uses them."""
    bad = [
        key
        for key, weight in model.named_parameters()
        if weight.is_floating_point() and not torch.linalg.vector_norm(weight.detach(), float("inf")).isfinite()
    ]
    if bad:
        dtype = next(model.parameters()).dtype
        stored = largest_stored(name, bad[0])
        if dtype == torch.float16 and stored is not None and isfinite(stored):
            raise OverflowsError(name, Overflow(f"the weight {bad[0]}", stored))
        raise UserError(f"the checkpoint {name} has weights that are NaN or infinite in {dtype}: {listed(bad)}")


def largest_stored(name: str, key: str) -> float | None:
    """The largest absolute value of a weight as the checkpoint has it; None if it has none with this name."""
    if isinstance(name, Named):
        weights = name.content.model.state_dict()
        return float(weights[key].float().abs().max()) if key in weights else None
    for file in weight_files(name):
        with safe_open(file, framework="pt") as weights:
            if key in weights.keys():  # noqa: SIM118
                return float(weights.get_tensor(key).float().abs().max())
    return None


def at(name: str) -> dict[str, Any]:
    """The argument of the hub's functions that says which revision of a name is meant."""
    return {"revision": name.revision} if isinstance(name, Revised) else {}


def base_model_name(name: str) -> str:
    """The model that LoRA adapters belong to; a model without adapters is its own base."""
    if isinstance(name, Named):
        return name
    with errors_naming(name):
        if find_adapter_config_file(name, **at(name)) is None:
            return name
        from peft import PeftConfig

        config = PeftConfig.from_pretrained(name, **at(name))
        base = config.base_model_name_or_path
        if not base:
            raise UserError("its adapter_config.json names no base model (base_model_name_or_path)")
        if no_such_folder(base):
            raise UserError(f"its adapter_config.json names the base model {base}, and there is no such folder")
        if config.revision and not Path(base).exists():
            base = Revised(base)
            base.revision = config.revision
        if find_adapter_config_file(base, **at(base)) is not None:
            raise UserError(f"its adapter_config.json names the base model {base}, which is itself an adapter")
        return base


def with_adapters(model: Any, name: str) -> Any:
    """The model with LoRA adapters merged into it. Raises ValueError for adapters of another kind; if the file lacks
    some, for which peft only warns; if it has others, as of another model, which peft leaves out; and if merging them
    changes what they give. A model on the meta device gets the merged one's parameters.
    """
    from peft import PeftConfig, PeftModel

    with errors_naming(name):
        (file,) = weight_files(name)  # peft would load other formats
        dtypes_of_floats(file)
        config: Any = PeftConfig.from_pretrained(name, **at(name))
        if config.peft_type != "LORA":
            raise UserError(f"it is an adapter of the kind {config.peft_type.value}, and only those of LoRA are merged")
        config.task_type = None  # a reward model may begin with a language model's adapters
        config.inference_mode = True
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # what peft still calls of transformers
            warnings.filterwarnings("ignore", message=r"The following (rank|alpha)_pattern keys")
            warnings.filterwarnings("ignore", message=r".*tie_word_embeddings")  # `part` does what it asks for
            adapted: Any = PeftModel(model, config, ADAPTER, low_cpu_mem_usage=model.device.type == "meta")
            inner: Any = adapted.base_model.model
            part(inner)
            if model.device.type == "meta":
                return adapted.unload().requires_grad_(True)
            read_adapters(adapted, name, file)
            ids = trial_ids(inner, config)
            expected = outputs(inner, ids)
            merged = adapted.merge_and_unload().requires_grad_(True)  # peft has frozen the base
            off = (outputs(merged, ids) - expected).abs().max() / expected.abs().max().clamp(min=1)
        if not off <= TOLERANCE[merged.dtype]:
            raise UserError(f"its adapters give other results when they are merged (off by {off:.2g} of the largest)")
        return merged


def read_adapters(adapted: Any, name: str, file: Path) -> None:
    """Reads the file of adapters. Raises ValueError if it is not of these."""
    try:
        result = adapted.load_adapter(name, ADAPTER, is_trainable=False, **at(name))
    except KeyError as error:  # of a module that was trained whole
        raise UserError(f"{file} lacks {error.args[0]}") from error
    lacking, others = (
        sorted(re.sub(rf"\.{ADAPTER}(?=\.|$)", "", key) for key in keys)
        for keys in (result.missing_keys, result.unexpected_keys)
    )
    if lacking:
        raise UserError(f"{file} lacks {listed(lacking)}")
    if others:
        base = adapted.peft_config[ADAPTER].base_model_name_or_path
        raise UserError(f"{file} has {listed(others)}, which the base {base} lacks")


def part(model: Any) -> None:
    """Makes tied embeddings and head, of which one is adapted, two weights: an adapter of one is not the other's."""
    head, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
    if head is None or (plain := base_of(head)).weight is not base_of(embeddings).weight:
        return
    tied_tokens = getattr(getattr(head, "token_adapter", None), "tied_adapter", None)  # the same ones in both
    if tied_tokens is None and (plain is not head or base_of(embeddings) is not embeddings):
        plain.weight = nn.Parameter(plain.weight.detach().clone())
        for config in (model.config, model.config.get_text_config()):
            config.tie_word_embeddings = False


def base_of(module: Any) -> Any:
    """The module within peft's layers, or wrappers of whole modules and of tokens."""
    while (inside := getattr(module, "base_layer", getattr(module, "original_module", None))) is not None:
        module = inside
    return module


def trial_ids(model: Any, config: Any) -> Tensor:
    """Some tokens [1, n], and those that are trained."""
    trained = config.trainable_token_indices or []
    few = [token for ids in (trained.values() if isinstance(trained, dict) else [trained]) for token in ids[:TRIED]]
    return torch.tensor([within_vocabulary(model, [*PROMPTS[0], *few])], device=model.device)


@torch.no_grad()
def outputs(model: Any, ids: Tensor) -> Tensor:
    """Logits; of a reward model, whose head may be new, hidden states."""
    if hasattr(model, "score"):
        return model.base_model(ids, use_cache=False).last_hidden_state.float()
    return model(ids, use_cache=False).logits.float()


def weight_files(name: str) -> list[Path]:
    """The files of a model's weights, or of LoRA adapters without their base; those of a hub model are downloaded.
    Raises ValueError if they are not safetensors: other formats can hold code, and loading may run it.
    """
    whole = base_model_name(name) == name
    for file in (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME) if whole else (ADAPTER_SAFE_WEIGHTS_NAME,):
        path = cached_file(name, file, _raise_exceptions_for_missing_entries=False, **at(name))
        if path is not None:
            files = get_checkpoint_shard_files(name, path, **at(name))[0] if file == SAFE_WEIGHTS_INDEX_NAME else [path]
            return [Path(file) for file in files]
    raise UserError("it has no weights in safetensors, and other formats, which can hold code, are not loaded")


def dtypes_of_floats(file: Path) -> set[str]:
    """Raises ValueError for weights in whole numbers: transformers would take quantized ones without their scales."""
    with safe_open(file, framework="pt") as weights:
        dtypes = {key: weights.get_slice(key).get_dtype() for key in weights.keys()}  # noqa: SIM118
        for key, dtype in dtypes.items():
            if key.endswith(".weight") and not dtype.startswith(("F", "BF")):
                raise UserError(f"{file} has {key} in {dtype}; quantized weights are not loaded")
        return set(dtypes.values())


def load_config(name: str, trust_remote_code: bool, **settings: Any) -> PretrainedConfig:
    """settings: other values than the model's."""
    if isinstance(name, Named):
        return name.content.config(**settings)
    base = base_model_name(name)
    return AutoConfig.from_pretrained(base, trust_remote_code=trust_remote_code, **at(base), **settings)


def has_tokenizer(name: str) -> bool:
    """Whether there are tokenizer files. Without them transformers makes up an empty tokenizer for some models."""
    return any(has_file(name, file) for file in TOKENIZER_FILES)


def has_file(name: str, file: str) -> bool:
    return cached_file(name, file, _raise_exceptions_for_missing_entries=False, **at(name)) is not None


@contextmanager
def errors_naming(name: str) -> Iterator[None]:
    """Turns the errors of transformers, safetensors and the hub, which share no base class, into a ValueError in one
    line that names the model and, if one is broken, the file of weights.
    """
    path = Path(name)
    if gguf := gguf_file(path):
        raise UserError(f"cannot load {name}: GGUF files hold rounded weights for inference. {converted(gguf)}")
    if path.is_file():
        raise UserError(f"cannot load {name}: it is a file, and models are folders")
    if no_such_folder(name) and not isinstance(name, Named):
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
        reason = f"its JSON files lack {error}, or name it and transformers does not know it" if key else error
        raise UserError(f"cannot load {name}: {broken_file(path) or reason}") from error


def gguf_file(path: Path) -> Path | None:
    """The GGUF file that a path is, or the first of a folder that has no weights in another form."""
    if path.is_file():
        return path if path.suffix == ".gguf" else None
    return None if any(path.glob("*.safetensors")) else min(path.glob("*.gguf"), default=None)


def converted(gguf: Path) -> str:
    """How to make a model of a GGUF file, for an error: transformers reads and dequantizes it with the package gguf."""
    file = f"{str(gguf.parent)!r}, gguf_file={gguf.name!r}"
    model = f"AutoModelForCausalLM.from_pretrained({file}, quantization_config=GgufConfig(dequantize=True))"
    saved = ".save_pretrained('FOLDER')"
    return (
        "To train from one, `pip install gguf` and, with AutoModelForCausalLM and AutoTokenizer of transformers and "
        "GgufConfig of transformers.utils.quantization_config, write it in transformers' layout:\n"
        f"  {model}{saved}\n  AutoTokenizer.from_pretrained({file}){saved}"
    )


def no_such_folder(name: str) -> bool:
    """Whether a name is a path that does not exist; it cannot be a hub name either."""
    return not Path(name).exists() and (name.startswith((".", "/", "~")) or name.count("/") > 1)


def broken_file(folder: Path) -> str | None:
    """What is wrong with a file of a model, where the error of transformers or safetensors may not name it."""
    settings = (CONFIG_NAME, ADAPTER_CONFIG_NAME, GENERATION_CONFIG_NAME, "tokenizer_config.json", "tokenizer.json")
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
