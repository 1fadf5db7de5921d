"""A model in the caller's memory instead of a checkpoint. The run trains copies; the caller's model
stays unchanged.
"""

import copy
import hashlib
from typing import Any, NamedTuple

import torch
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from fastp3o.errors import UserError

BLOCK_BYTES = 2**16  # read of the middle of a tensor


class LoadedModel(NamedTuple):
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase

    def config(self, **settings: Any) -> PretrainedConfig:
        """A copy of the model's configuration. settings: values that replace those of the model."""
        known = self.model.config.to_dict()
        # Of weights that were dequantized as they were loaded, such as a GGUF's. `copied` refuses
        # quantized ones.
        known.pop("quantization_config", None)
        config = type(self.model.config).from_dict({**known, **settings})
        config.name_or_path = self.model.name_or_path
        return config

    def copied(
        self, model_class: Any, config: PretrainedConfig, **options: Any
    ) -> tuple[Any, dict[str, Any]]:
        """A copy on the CPU, and lists of missing and unexpected weights. options: of
        `from_pretrained`.
        """
        weights = self.model.state_dict()
        whole = [
            name
            for name, w in weights.items()
            if not w.is_floating_point() or w.element_size() == 1
        ]
        if other := [name for name in whole if name.endswith(".weight")]:
            raise UserError(
                f"model has {other[0]} in {weights[other[0]].dtype}; quantized weights are not loaded"
            )
        kind = model_class._model_mapping[type(config)]
        model, loading = kind.from_pretrained(
            None,
            config=config,
            state_dict={
                name: weight.detach().to("cpu", copy=True) for name, weight in weights.items()
            },
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            **options,
        )
        self.copy_generation_config(model)
        if own := own_code(self.model, model):
            raise UserError(
                f"model has {own}, which would be lost because training reloads it from its config: remove it first"
            )
        return model, loading

    def copy_generation_config(self, model: Any) -> None:
        if model.can_generate() and self.model.can_generate():
            model.generation_config = copy.deepcopy(self.model.generation_config)

    def fingerprint(self) -> str:
        """The hash of its settings and vocabulary, and of a block of each weight."""
        digest = hashlib.sha256(self.model.config.to_json_string().encode())
        digest.update(
            f"{sorted(self.tokenizer.get_vocab().items())} {self.tokenizer.chat_template}".encode()
        )
        if self.model.can_generate():
            digest.update(self.model.generation_config.to_json_string().encode())
        for name, weight in self.model.state_dict().items():
            digest.update(f"{name} {weight.dtype} {list(weight.shape)}".encode())
            length = BLOCK_BYTES // weight.element_size()
            first = max(0, weight.numel() - length) // 2
            block = weight.detach().flatten()[first : first + length].cpu().contiguous()
            digest.update(block.view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()


def own_code(model: PreTrainedModel, plain: PreTrainedModel) -> str:
    """What the model computes with and its plain copy would lack, in words: a class, method, number
    or hook. "" if nothing.
    """
    if type(model).__module__.partition(".")[0] not in ("transformers", "transformers_modules"):
        return f"a class of its own, {type(model).__name__}"
    copies = dict(plain.named_modules())
    for name, module in model.named_modules():
        place = name or type(model).__name__
        hooks = (
            module._forward_hooks,
            module._forward_pre_hooks,
            module._backward_hooks,
            module._backward_pre_hooks,
        )
        # transformers' own, such as gradient checkpointing's, change no value.
        if any(
            not str(hook.__module__).startswith("transformers.")
            for kind in hooks
            for hook in kind.values()
        ):
            return f"a hook in {place}"
        if "forward" in vars(module):
            return f"a forward method of its own in {place}"
        # A reward model begins with another model's body.
        copied = copies.get(name, module) if name else module
        if type(copied) is not type(module):
            return f"a {type(module).__name__} of its own in {place}"
        for key, value in vars(copied).items():
            if value and isinstance(value, float) and vars(module).get(key) != value:
                # 0: noise that a run takes off.
                return f"another {key} in {place} than its configuration gives"
    hooked = (
        name
        for name, w in model.named_parameters()
        if w._backward_hooks or w._post_accumulate_grad_hooks
    )
    return next((f"a hook in {name}" for name in hooked), "")
