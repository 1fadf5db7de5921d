"""Which models may run on packed rows: those that give every response what it gets alone. Others are refused."""

from collections.abc import Iterator
from contextlib import contextmanager
from math import isfinite
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel

from fastp3o.models import attention
from fastp3o.models.packed_model import PackedModel, evaluation_mode, scored_logprobs, scores
from fastp3o.packing.pack import Packing, pack

SLIDING = "sliding_attention"
ISOLATING_LAYERS = {"full_attention", SLIDING}
PROMPTS = [[11, 3, 5, 7], [2, 9]]
RESPONSES = [[[4, 8, 6], [10, 5]], [[7], [3, 11, 12, 4, 9]]]
# Of log-probabilities or scores, on average: rounding stays far below, and a leak or a wrong position far above.
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.1}
NOTING = "fastp3o_segments_on_trial"


def require_packable(model: PackedModel, name: str) -> PackedModel:
    """Returns the model after a look at its kind and a trial on a few tokens.

    Raises ValueError where a packed row gives other results than its responses alone, with the reason if known, and
    where it gives other ones in training mode.
    """
    inner = model.model
    named = f"{name} ({type(inner).__name__})"
    refused = f"{named} cannot be run on packed sequences: "
    config = inner.config.get_text_config()
    layers = set(getattr(config, "layer_types", None) or ())
    stateful = sorted(layers - ISOLATING_LAYERS)
    if inner._is_stateful or stateful:
        kinds = ", ".join(stateful) or "recurrent"
        raise ValueError(
            f"{refused}its layers ({kinds}) are not plain or sliding attention, which alone keeps sequences apart"
        )
    if not inner._supports_attention_backend:
        raise ValueError(
            f"{refused}its attention does not go through transformers' AttentionInterface, which keeps them apart"
        )
    try:
        trial = trial_of(model)
    except Exception as error:  # from anywhere in a model that does not hand the segments on
        raise ValueError(f"{refused}a trial failed with: {error}") from error
    difference = (trial.packed - trial.alone).abs().mean().item()
    if not isfinite(difference):
        raise ValueError(f"{name} gives values that are not finite in {inner.dtype}: use another --precision")
    if difference > TOLERANCE[inner.dtype]:
        raise ValueError(
            f"{refused}they get other results than alone (off by {difference:.2g} on average), so something in it "
            "looks beyond the segments of the attention, or changes logits behind the head"
        )
    # The trial's sequences are shorter than any window.
    slides = SLIDING in layers if layers else getattr(config, "sliding_window", None)
    if slides and not trial.windows:
        raise ValueError(f"{refused}transformers does not hand its sliding window on to the AttentionInterface")
    noise = (trial.training - trial.packed).abs().mean().item()
    if not noise <= TOLERANCE[inner.dtype]:
        raise ValueError(
            f"{named} cannot be trained: its training mode gives other results (off by {noise:.2g} on average), as "
            "where experts are chosen at random, and ratios would be those of two different policies"
        )
    return model


class Trial(NamedTuple):
    """Log-probabilities, or a reward model's scores, of a few responses: in one row, in one row in training mode, and
    from transformers alone. windows: that attention was called with.
    """

    packed: Tensor
    training: Tensor
    alone: Tensor
    windows: set[int]


@torch.no_grad()
def trial_of(model: PackedModel) -> Trial:
    """Leaves the model and the random generators as they were."""
    inner = model.model
    run_packed, run_alone = (scores, score_alone) if hasattr(inner, "score") else (scored_logprobs, logprobs_alone)
    prompts = [within_vocabulary(inner, ids) for ids in PROMPTS]
    responses = [[within_vocabulary(inner, ids) for ids in group] for group in RESPONSES]
    (row,) = pack(prompts, responses, Packing(tokens_per_row=100))
    row = row.to(inner.device)
    with evaluation_mode(model), torch.random.fork_rng([inner.device] if inner.device.type == "cuda" else []):
        with noting_windows(inner) as windows:
            packed = run_packed(model, row)
        with model.with_own_attention():
            alone = [run_alone(inner, prompts[g], response) for g in row.groups for response in responses[g]]
        training = run_packed(model.train(), row)
    return Trial(packed, training, torch.cat(alone), windows)


@contextmanager
def noting_windows(model: PreTrainedModel) -> Iterator[set[int]]:
    """The sliding windows that the model's attention is called with in a block."""
    windows: set[int] = set()

    def noting(*args: Any, **options: Any) -> tuple[Tensor, None]:
        if options.get("sliding_window"):
            windows.add(options["sliding_window"])
        return attention.segment_attention(*args, **options)

    AttentionInterface.register(NOTING, noting)
    model.set_attn_implementation(NOTING)
    try:
        yield windows
    finally:
        model.set_attn_implementation(attention.NAME)


def within_vocabulary(model: PreTrainedModel, ids: list[int]) -> list[int]:
    """The ids within a small vocabulary; transformers' classifiers skip padding, so none of them is that."""
    largest = model.config.get_text_config().vocab_size - 1
    return [min(token + (token == model.config.pad_token_id), largest) for token in ids]


def logprobs_alone(model: PreTrainedModel, prompt: list[int], response: list[int]) -> Tensor:
    logits = logits_of(model, prompt + response)[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1).gather(1, torch.tensor(response, device=logits.device)[:, None]).squeeze(1)


def score_alone(model: PreTrainedModel, prompt: list[int], response: list[int]) -> Tensor:
    return logits_of(model, prompt + response).squeeze(1)


def logits_of(model: PreTrainedModel, ids: list[int]) -> Tensor:
    return model(torch.tensor([ids], device=model.device), use_cache=False).logits.float()
