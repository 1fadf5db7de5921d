"""Tries a model on a few tokens. Refuses one that computes other results for a response in a packed
row than for the response alone, and reports values that fp16 cannot hold.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import isfinite
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel

from fastp3o.errors import UserError
from fastp3o.models import attention
from fastp3o.models.overflow import Overflow, not_finite_error, overflow, weight_overflow
from fastp3o.models.packed_model import PackedModel, evaluation_mode, labeled_logprobs, vectors
from fastp3o.packing.pack import Packing, pack
from fastp3o.packing.packed_row import PackedRow
from fastp3o.sources import ModelSource

SLIDING = "sliding_attention"
ISOLATING_LAYERS = {"full_attention", SLIDING}
PROMPTS = [[11, 3, 5, 7], [2, 9]]
RESPONSES = [[[4, 8, 6], [10, 5]], [[7], [3, 11, 12, 4, 9]]]
DRAWN = 12  # tokens from all of the vocabulary
# Mean difference of log-probabilities or scores: rounding stays far below, a leak or a wrong
# position far above.
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.1}


def logprob_tolerance(model: PackedModel, dtype: torch.dtype) -> float:
    """The tolerance for a token's log-prob, in nats. A temperature below 1 multiplies the error of
    the logits.
    """
    return TOLERANCE[dtype] / min(1.0, model.temperature)


def require_packable(model: PackedModel, name: ModelSource) -> PackedModel:
    """Returns the model after a check of its layers and a trial on a few tokens. Raises ValueError,
    with the reason if it is known, if a packed row gives other results than its single responses.
    """
    inner = model.model
    refused = f"{name} ({type(inner).__name__}) cannot be run on packed sequences: "
    config = inner.config.get_text_config()
    layers = set(getattr(config, "layer_types", None) or ())
    stateful = sorted(layers - ISOLATING_LAYERS)
    if inner._is_stateful or stateful:
        kinds = f"its layers ({', '.join(stateful) or 'recurrent'})"
        raise UserError(
            f"{refused}{kinds} are not plain or sliding attention: only these keep sequences apart"
        )
    if not inner._supports_attention_backend:
        other = "its attention does not go through transformers' AttentionInterface"
        raise UserError(f"{refused}{other}, which keeps them apart")
    try:
        trial = run_trial(model)
    except Exception as error:  # from anywhere in a model that does not pass the segments on
        raise UserError(f"{refused}a trial failed with: {error}") from error
    difference = (trial.packed - trial.single).abs().mean().item()
    if not isfinite(difference):
        with on_trial(model) as (_, row):
            raise not_finite_error(model, row, str(name))
    if difference > TOLERANCE[inner.dtype]:
        off = f"they get other results than alone (off by {difference:.2g} on average)"
        raise UserError(
            f"{refused}{off}: it looks beyond segments, or changes logits behind the head"
        )
    # The trial's sequences are shorter than any window; one that no sequence leaves hides nothing.
    window = getattr(config, "sliding_window", None)
    slides = SLIDING in layers if layers else window
    reached = window is None or model.longest_sequence is None or window < model.longest_sequence
    if slides and reached and not trial.windows:
        raise UserError(
            f"{refused}transformers does not pass its sliding window to the AttentionInterface"
        )
    return model


def require_finite_logprobs(model: PackedModel, name: str) -> None:
    """Raises UserError, with the place where they arise, if the trial's log-probabilities are NaN
    or infinite.
    """
    with on_trial(model) as (run, row):
        if not run(model, row).isfinite().all():
            raise not_finite_error(model, row, str(name))


def require_trainable(model: PackedModel, name: ModelSource) -> PackedModel:
    """Returns the model after a trial in training mode. Raises ValueError if it then computes other
    results.
    """
    with on_trial(model) as (run, row):
        noise = (run(model.train(), row) - run(model.eval(), row)).abs().mean().item()
    if not noise <= TOLERANCE[model.model.dtype]:
        off = f"its training mode gives other results (off by {noise:.2g} on average), as of experts chosen at random"
        raise UserError(f"{name} ({type(model.model).__name__}) cannot be trained: {off}")
    return model


def trial_overflow(model: PackedModel, device: torch.device | None = None) -> Overflow | None:
    """The weight that fp16 does not hold, or the `overflow` of the trial's texts and of tokens from
    all of the vocabulary, behind the one that sequences begin with: a sequence's first token has
    the largest values, and that one where there is one. device: where this is computed, a layer at
    a time; by default where the model is.
    """
    config = model.model.config.get_text_config()
    begin = [config.bos_token_id] if isinstance(config.bos_token_id, int) else []
    drawn = [(2 * number + 1) * config.vocab_size // (2 * DRAWN) for number in range(DRAWN)]
    tokens = [*begin, *drawn][: model.longest_sequence]
    prompts, responses = trial_texts(model.model)
    packing = Packing(tokens_per_row=100)
    (row,) = pack([tokens[:-1], *prompts], [[tokens[-1:], tokens[-1:]], *responses], packing)
    return weight_overflow(model) or overflow(model, row, device)


class Trial(NamedTuple):
    """Log-probabilities, or the outputs of a reward model's head, of a few responses. packed: in
    one row. single: one by one, from transformers. windows: the sliding windows that attention was
    called with.
    """

    packed: Tensor
    single: Tensor
    windows: set[int]


def run_trial(model: PackedModel) -> Trial:
    inner = model.model
    windows: set[int] = set()

    def note_window(*args: Any, **options: Any) -> tuple[Tensor, None]:
        if window := options.get("sliding_window"):
            windows.add(window)
        return attention.segment_attention(*args, **options)

    with on_trial(model) as (run, row):
        AttentionInterface.register(attention.NAME, note_window)
        try:
            packed = run(model, row)
        finally:
            AttentionInterface.register(attention.NAME, attention.compilable_attention)
        prompts, responses = trial_texts(inner)
        with model.with_own_attention():
            single = [
                run_single(inner, prompts[g], response)
                for g in row.groups
                for response in responses[g]
            ]
    return Trial(packed, torch.cat(single), windows)


@contextmanager
def on_trial(
    model: PackedModel,
) -> Iterator[tuple[Callable[[PackedModel, PackedRow], Tensor], PackedRow]]:
    """Yields a function of model and row, and a row; keeps no gradients. Mode and random generators
    stay unchanged.
    """
    inner = model.model
    (row,) = pack(*trial_texts(inner), Packing(tokens_per_row=100))
    generators = [inner.device] if inner.device.type == "cuda" else []
    with torch.no_grad(), evaluation_mode(model), torch.random.fork_rng(generators):
        yield vectors if hasattr(inner, "score") else labeled_logprobs, row.to(inner.device)


def run_single(model: PreTrainedModel, prompt: list[int], response: list[int]) -> Tensor:
    """Log-probabilities [n] of one response, or the outputs [1, n] of a reward model's head."""
    ids = torch.tensor([prompt + response], device=model.device)
    logits = model(ids, use_cache=False).logits.float()
    if hasattr(model, "score"):
        return logits
    return (
        logits[0, len(prompt) - 1 : -1]
        .log_softmax(-1)
        .gather(1, ids[0, len(prompt) :, None])
        .squeeze(1)
    )


def trial_texts(model: PreTrainedModel) -> tuple[list[list[int]], list[list[list[int]]]]:
    """Prompts, and responses to each, for a trial."""
    prompts, *responses = [
        [within_vocabulary(model, ids) for ids in group] for group in (PROMPTS, *RESPONSES)
    ]
    return prompts, responses


def within_vocabulary(model: PreTrainedModel, ids: list[int]) -> list[int]:
    """The ids, limited to a small vocabulary. None of them is padding, which transformers'
    classifiers skip.
    """
    largest = model.config.get_text_config().vocab_size - 1
    return [min(token + (token == model.config.pad_token_id), largest) for token in ids]
