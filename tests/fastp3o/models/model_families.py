"""Tiny random models of many families, and what transformers gives for their responses one at a
time.

The weights are large enough that a leak between responses would show.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import torch
import transformers as hf
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from fastp3o.config import TrainableConfig
from fastp3o.models.packed_model import PackedModel, labeled_logprobs
from fastp3o.models.save import adapter_config, adapter_weights, write_adapter
from fastp3o.models.trainable import add_lora
from fastp3o.objectives.base import Microbatch
from fastp3o.objectives.config.p3o import P3OConfig
from fastp3o.packing.pack import Packing, pack
from fastp3o.packing.packed_row import Ids, PackedRow
from fastp3o_kernels import P3OSettings, p3o_loss

VOCABULARY = 48
WINDOW = 4
BEGIN = 1
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
SIZES |= {
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": BEGIN,
    "eos_token_id": 2,
}
UNGROUPED = SIZES | {"intermediate_size": 48}
GROUPED = UNGROUPED | {"num_key_value_heads": 1}
GEMMA = GROUPED | {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": WINDOW}
GEMMA |= {"layer_types": ["sliding_attention", "full_attention"]}
GEMMA_3N = {name: value for name, value in GEMMA.items() if name != "query_pre_attn_scalar"}
GEMMA_3N |= {
    "intermediate_size": [48, 48],
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCABULARY,
}
GEMMA_3N |= {"num_kv_shared_layers": 0, "laurel_rank": 4, "activation_sparsity_pattern": [0.0, 0.0]}
SOFTCAPS = {"attn_logit_softcapping": 1.5, "final_logit_softcapping": 2.0}

CONFIGS: dict[str, Callable[[], PretrainedConfig]] = {
    "llama": lambda: hf.LlamaConfig(**GROUPED),
    "qwen2": lambda: hf.Qwen2Config(**GROUPED),
    "qwen3": lambda: hf.Qwen3Config(**GROUPED, head_dim=16),
    "mistral": lambda: hf.MistralConfig(**GROUPED, sliding_window=WINDOW),
    "gemma2": lambda: hf.Gemma2Config(**GEMMA, **SOFTCAPS),
    "gemma3": lambda: hf.Gemma3TextConfig(**GEMMA),
    "gpt2": lambda: hf.GPT2Config(**SIZES, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0),
    "gpt_neox": lambda: hf.GPTNeoXConfig(**UNGROUPED),
    "opt": lambda: hf.OPTConfig(**SIZES, ffn_dim=48, word_embed_proj_dim=32, dropout=0.0),
    "cohere": lambda: hf.CohereConfig(**GROUPED, logit_scale=0.25),
    "granite": lambda: hf.GraniteConfig(**GROUPED, logits_scaling=3.0, embedding_multiplier=2.0),
}
FAMILIES = tuple(CONFIGS)

UNITS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
FEW = UNITS | {"n_routed_experts": 4, "first_k_dense_replace": 1, "topk_group": 1}
LATENT = {
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
}
# Mixtures of experts, whose weights are one parameter in memory and many in files; and one with
# embeddings in layers.
CONFIGS |= {
    "qwen3_moe": lambda: hf.Qwen3MoeConfig(**GROUPED, **UNITS, num_experts=4, head_dim=16),
    "qwen2_moe": lambda: hf.Qwen2MoeConfig(
        **GROUPED, **UNITS, num_experts=4, shared_expert_intermediate_size=24
    ),
    "mixtral": lambda: hf.MixtralConfig(**GROUPED, num_local_experts=4),
    "olmoe": lambda: hf.OlmoeConfig(**GROUPED, num_experts=4, num_experts_per_tok=2),
    "granitemoe": lambda: hf.GraniteMoeConfig(
        **GROUPED, num_local_experts=4, num_experts_per_tok=2
    ),
    "phimoe": lambda: hf.PhimoeConfig(**GROUPED, num_local_experts=4),
    "glm4_moe": lambda: hf.Glm4MoeConfig(**GROUPED, **FEW, head_dim=16, n_group=1),
    "deepseek_v3": lambda: hf.DeepseekV3Config(**UNGROUPED, **FEW, **LATENT, n_group=2),
    "gemma3n": lambda: hf.Gemma3nTextConfig(**GEMMA_3N),
}
EXPERTS = ("qwen3_moe", "qwen2_moe", "mixtral", "olmoe", "granitemoe", "glm4_moe", "deepseek_v3")


def random_model(family: str, auto=hf.AutoModelForCausalLM, **changes) -> PreTrainedModel:
    """Uses transformers' eager attention, the plainest there is."""
    config = CONFIGS[family]()
    for name, value in changes.items():
        setattr(config, name, value)
    torch.manual_seed(0)
    model = auto.from_config(config, attn_implementation="eager")
    enlarge(model)
    return model.eval()


@torch.no_grad()
def enlarge(model: nn.Module) -> None:
    """Matrices of standard deviation 0.3, and norms and biases that are not 1 and 0."""
    for parameter in model.parameters():
        noise = 0.3 * torch.randn_like(parameter)
        parameter.copy_(noise if parameter.dim() > 1 else parameter + noise)


# Modules whose results go into the residual stream, the last of a block first.
INTO_THE_STREAM = ("post_feedforward_layernorm", "down_proj", "mlp.c_proj", "dense_4h_to_h", "fc2")


@torch.no_grad()
def with_large_stream(model: PreTrainedModel, reach: float, token: int = BEGIN) -> PreTrainedModel:
    """The model with values as large as this in one channel of its residual stream, as trained
    models have them, at the token that sequences begin with: the first block adds them. token: of
    which the value is exact.
    """
    block = {name: module for name, module in model.named_modules() if ".0." in name}
    added = next(
        module for end in INTO_THE_STREAM for name, module in block.items() if name.endswith(end)
    )
    found: list[Tensor] = []
    handle = added.register_forward_hook(lambda _, __, values: found.append(values.flatten().abs()))
    model(torch.tensor([[token]]), use_cache=False)
    handle.remove()
    channel = found[0].argmax()
    offset = 1.0 * ("gemma" in model.config.model_type)  # Gemma's norms multiply by 1 + weight
    weight = added.weight.T if isinstance(added, Conv1D) else added.weight
    for values in (weight, getattr(added, "bias", None)):
        if values is not None:
            values[channel] = (values[channel] + offset) * (reach / found[0][channel]) - offset
    return model


def adapted(
    family: str, targets: str = "all-linear", dropout: float = 0.0, **changes
) -> PackedModel:
    """A model with LoRA adapters that are far from zero."""
    model = PackedModel(random_model(family, **changes))
    add_lora(
        model,
        TrainableConfig(lora_rank=3, lora_alpha=6.0, lora_targets=targets, lora_dropout=dropout),
    )
    enlarge_trained(model)
    return model


def save_adapter(model: PackedModel, folder: Path) -> None:
    write_adapter(
        folder, adapter_config(model.model), adapter_weights(dict(model.named_parameters()))
    )


def enlarge_trained(model: PackedModel) -> None:
    enlarge(
        nn.ParameterList(parameter for parameter in model.parameters() if parameter.requires_grad)
    )


@dataclass
class Groups:
    """Prompts with their responses, and random numbers of a rollout. Sequence s is a response,
    counted over all.
    """

    prompts: list[Ids]
    responses: list[list[Ids]]

    @property
    def sequences(self) -> list[tuple[Ids, Ids]]:
        return [
            (x, y) for x, group in zip(self.prompts, self.responses, strict=True) for y in group
        ]

    def row(self, *, share_prompts: bool = True) -> PackedRow:
        (row,) = pack(self.prompts, self.responses, Packing(1000, share_prompts))
        return row

    def first_row(self, tokens_per_row: int, *, share_prompts: bool = True) -> PackedRow:
        (row,) = pack(self.prompts[:1], self.responses[:1], Packing(tokens_per_row, share_prompts))
        return row

    def order(self, row: PackedRow) -> list[int]:
        """The sequence that each response of the row is."""
        first = [0, *accumulate(map(len, self.responses))]
        return [s for g in row.groups for s in range(first[g], first[g + 1])]

    def replaced(self, group: int, response: int, ids: Ids) -> "Groups":
        responses = [list(group) for group in self.responses]
        responses[group][response] = ids
        return Groups(self.prompts, responses)


# Longer than the window, and of one token; the largest group, which packing puts first, is not the
# first.
PAIRS = Groups(
    prompts=[[3], [5, 6, 7, 8, 9, 10, 11], [12, 13]],
    responses=[[[4], [14, 15, 16, 2]], [[17, 18, 19, 20, 21, 22], [23]], [[24, 25], [26, 27, 2]]],
)
FOURS = Groups(
    prompts=[[5, 6, 7, 8, 9, 10], [3]],
    responses=[
        [[17, 18, 2], [23], [24, 25, 26, 27, 28, 29], [30, 2]],
        [[4, 2], [31, 32, 33, 34, 35], [36], [37]],
    ],
)


def rollout_near(logprobs: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """A loss's constants: old log-probs, near these; a reference's, further away; and rewards [P,
    2].
    """
    generator = torch.Generator().manual_seed(0)

    def near(distance: float) -> list[Tensor]:
        return [
            part.detach() + distance * torch.randn(part.shape, generator=generator)
            for part in logprobs
        ]

    return near(0.03), near(0.3), torch.randn(len(logprobs) // 2, 2, generator=generator)


@dataclass
class Outcome:
    logprobs: list[Tensor]  # of each response's tokens
    loss: Tensor
    gradients: dict[str, Tensor]


LOSS = P3OConfig(model="", output_dir="", prompts="", reward="", clipping="joint", kl_coef=0.2)


def logprobs_alone(model: PreTrainedModel, prompt: Ids, response: Ids) -> Tensor:
    logits = model(torch.tensor([prompt + response]), use_cache=False).logits[
        0, len(prompt) - 1 : -1
    ]
    return logits.log_softmax(-1).gather(1, torch.tensor(response)[:, None]).squeeze(1)


def alone(model: PreTrainedModel, groups: Groups) -> Outcome:
    """One sequence at a time through transformers, P3O from the sums."""
    logprobs = [logprobs_alone(model, prompt, response) for prompt, response in groups.sequences]
    old, ref, rewards = rollout_near(logprobs)
    settings = P3OSettings(clipping="joint", kl_coef=LOSS.kl_coef)
    loss = p3o_loss(sums(logprobs), sums(old), sums(ref), rewards, settings).loss
    return outcome(model, logprobs, loss)


def packed(
    model: PackedModel, groups: Groups, expected: Outcome, *, share_prompts: bool = True
) -> Outcome:
    """The same through a packed row."""
    row = groups.row(share_prompts=share_prompts)
    order = groups.order(row)
    logprobs: list[Tensor] = [torch.empty(0)] * len(order)
    for s, part in zip(order, labeled_logprobs(model, row).split(row.labeled_lengths), strict=True):
        logprobs[s] = part
    *known, rewards = rollout_near(expected.logprobs)
    old, ref = ([values[s] for s in order] for values in known)
    rewards = rewards[[s // 2 for s in order[::2]]]
    microbatch = Microbatch(row, rewards, torch.cat(old), torch.cat(ref))
    loss, _ = LOSS.build().loss(model, microbatch, len(rewards))
    return outcome(model.model, logprobs, loss)


def sums(logprobs: Sequence[Tensor]) -> Tensor:
    return torch.stack([part.sum() for part in logprobs]).view(-1, 2)


def outcome(model: nn.Module, logprobs: list[Tensor], loss: Tensor) -> Outcome:
    model.zero_grad()
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad}
    model.zero_grad()
    return Outcome([part.detach() for part in logprobs], loss.detach(), gradients)


def assert_equal(got: Outcome, expected: Outcome) -> None:
    """Up to rounding. Some gradients are zero but for that, such as those of keys' biases without
    rotary positions.
    """
    for logprobs, expected_logprobs in zip(got.logprobs, expected.logprobs, strict=True):
        torch.testing.assert_close(logprobs, expected_logprobs, atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(got.loss, expected.loss, atol=2e-5, rtol=1e-5)
    assert got.gradients.keys() == expected.gradients.keys()
    largest = max(gradient.norm() for gradient in expected.gradients.values())
    assert largest > 0
    for name, gradient in expected.gradients.items():
        error = (got.gradients[name] - gradient).norm()
        assert error <= 3e-5 * gradient.norm() + 3e-6 * largest, (
            f"{name}: {error} of {gradient.norm()}"
        )
