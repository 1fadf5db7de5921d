"""Which tokens end a response."""

from transformers import PreTrainedModel, PreTrainedTokenizerBase


def end_of_sequence_ids(policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """The tokenizer's end-of-sequence and those that the checkpoint stops at (a chat model's end of turn)."""
    own = policy.generation_config.eos_token_id
    return {tokenizer.eos_token_id, *(own if isinstance(own, list) else [] if own is None else [own])}


def cut_after_end(ids: list[int], end_ids: set[int]) -> list[int]:
    for position, token in enumerate(ids):
        if token in end_ids:
            return ids[: position + 1]
    return ids
