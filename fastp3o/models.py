"""Policy, reference and reward model: loading them, and log-probabilities and scores of a batch."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from fastp3o.padding import Batch
from fastp3o_kernels import token_logprobs


def load_tokenizer(name: str, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer of a model. Raises ValueError where it has no end-of-sequence token: responses could not end."""
    tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
    if tokenizer.eos_token_id is None:
        raise ValueError(f"the tokenizer of {name} has no end-of-sequence token; set eos_token in its configuration")
    if tokenizer.pad_token_id is None:
        # Padding is masked wherever it is used, so any id serves.
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_policy(name: str, *, trust_remote_code: bool = False) -> PreTrainedModel:
    """A causal LM with fp32 weights and no dropout: a policy's log-probabilities must not be random."""
    return AutoModelForCausalLM.from_pretrained(
        name, dtype=torch.float32, trust_remote_code=trust_remote_code, **dropout_off(name, trust_remote_code)
    )


def load_reward_model(name: str, *, trust_remote_code: bool = False) -> PreTrainedModel:
    """A sequence classifier with one output. From a causal LM's checkpoint the scalar head starts at zero.

    Raises ValueError where the model has no linear `score` head over hidden states, or more than one output.
    """
    model, loading = AutoModelForSequenceClassification.from_pretrained(
        name,
        num_labels=1,
        dtype=torch.float32,
        trust_remote_code=trust_remote_code,
        output_loading_info=True,
        **dropout_off(name, trust_remote_code),
    )
    head = getattr(model, "score", None)
    if not isinstance(head, nn.Linear):
        raise ValueError(f"{type(model).__name__} ({name}) has no linear head `score`; use a decoder-only reward model")
    if head.out_features != 1:
        raise ValueError(f"{name} has {head.out_features} outputs; a reward model has one")
    if model.config.pad_token_id is None:
        # transformers refuses batches otherwise; the scores here are read at known positions.
        model.config.pad_token_id = model.config.eos_token_id
    if any(key.startswith("score.") for key in loading["missing_keys"]):
        nn.init.zeros_(head.weight)
    return model


def dropout_off(name: str, trust_remote_code: bool) -> dict[str, float]:
    """Zero for every dropout probability that the model's configuration has."""
    config = AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)
    return {
        key: 0.0
        for key, value in config.to_dict().items()
        if isinstance(value, float) and key.endswith(("dropout", "pdrop", "dropout_prob", "layerdrop", "drop"))
    }


def unwrap(model: nn.Module) -> PreTrainedModel:
    """The transformers model inside a distributed wrapper."""
    return getattr(model, "module", model)


def scored_logits(model: nn.Module, batch: Batch) -> Tensor:
    """Logits that predict the scored tokens of a batch, [N, V] fp32."""
    with head_over(unwrap(model).get_output_embeddings(), batch.scored_rows, layout=lambda logits: logits.unsqueeze(0)):
        output = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask, use_cache=False)
    return output.logits.squeeze(0)


def scored_logprobs(model: nn.Module, batch: Batch) -> Tensor:
    """Log-probabilities of the scored tokens of a batch, [N] fp32."""
    return token_logprobs(scored_logits(model, batch), batch.labels)


def scores(model: nn.Module, batch: Batch) -> Tensor:
    """A reward model's score of each sequence of a batch, read at its last token, [S] fp32."""
    T = batch.input_ids.shape[1]
    # The model goes on to pick one of T positions of each sequence: they all hold its score.
    with head_over(unwrap(model).score, batch.last_rows, layout=lambda score: score.unsqueeze(1).expand(-1, T, -1)):
        output = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask, use_cache=False)
    return output.logits.squeeze(1)


@contextmanager
def head_over(head: nn.Module, rows: Tensor, layout: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Lets a head see only some rows of the flattened hidden states, in fp32; `layout` shapes what it returns.

    Replacing the head's forward, instead of calling body and head apart, keeps whatever the model does to its logits
    (scaling, soft capping) and enters through the module that a distributed wrapper has wrapped. Rounding logits to
    bf16 would drown small log-ratios of whole sequences, so autocast ends here.
    """
    forward = head.forward

    def forward_over_rows(hidden: Tensor) -> Tensor:
        with torch.autocast(hidden.device.type, enabled=False):
            return layout(forward(hidden.flatten(0, 1)[rows].float()))

    head.forward = forward_over_rows
    try:
        yield
    finally:
        head.forward = forward
