"""Prompts and responses -> one padded batch, with the rows that the losses need.

Shapes: S sequences, T tokens of the longest, N scored tokens in all.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Batch:
    """Sequences as a model takes them, and where in its flattened output [S * T] the scored tokens are predicted."""

    input_ids: Tensor  # [S, T] int64
    attention_mask: Tensor  # [S, T] int64, 0 on padding
    scored_rows: Tensor  # [N] int64, rows of [S * T] whose hidden state predicts a scored token
    labels: Tensor  # [N] int64, the scored tokens
    cu_seqlens: Tensor  # [S + 1] int32, where each sequence's scored tokens begin in [N]
    last_rows: Tensor  # [S] int64, rows of [S * T] that hold each sequence's last token

    def to(self, device: torch.device) -> "Batch":
        return Batch(**{name: tensor.to(device) for name, tensor in vars(self).items()})


def pad(
    prompts: list[list[int]], responses: list[list[int]], *, pad_token_id: int, score_prompts: bool = False
) -> Batch:
    """Pads prompt + response on the right; scored are the response's tokens, its end-of-sequence included.

    With `score_prompts` the prompt's tokens are scored too, except the first, which nothing predicts.
    Raises ValueError for an empty prompt or response, naming its index.
    """
    for i, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        if not prompt or not response:
            raise ValueError(
                f"sequence {i} has {len(prompt)} prompt and {len(response)} response tokens; both need one"
            )
    sequences = [prompt + response for prompt, response in zip(prompts, responses, strict=True)]
    T = max(map(len, sequences))
    first_scored = [1 if score_prompts else len(prompt) for prompt in prompts]

    scored_rows = [s * T + t - 1 for s, ids in enumerate(sequences) for t in range(first_scored[s], len(ids))]
    labels = [token for s, ids in enumerate(sequences) for token in ids[first_scored[s] :]]
    scored_lengths = [len(ids) - first for ids, first in zip(sequences, first_scored, strict=True)]
    return Batch(
        input_ids=torch.tensor([ids + [pad_token_id] * (T - len(ids)) for ids in sequences]),
        attention_mask=torch.tensor([[1] * len(ids) + [0] * (T - len(ids)) for ids in sequences]),
        scored_rows=torch.tensor(scored_rows),
        labels=torch.tensor(labels),
        cu_seqlens=torch.tensor([0, *scored_lengths]).cumsum(0, dtype=torch.int32),
        last_rows=torch.tensor([s * T + len(ids) - 1 for s, ids in enumerate(sequences)]),
    )
