"""Hidden states below the layers that train, computed once for many runs on the same groups.

With `--trainable_layers n` everything below the top n layers is frozen, so what goes into them
depends on a group's tokens alone. It is kept by these, also in a file, and the runs compute the top
layers only. Products on a CPU round a token the same whatever stands beside it in the row.
"""

from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastp3o.models.packed_model import PackedModel
from fastp3o.packing.packed_row import PackedRow, Segments

SAVED_EVERY = 8  # rows


class FrozenStates:
    """What goes into the top `layers` layers, by groups of two responses after a shared prompt.

    kept: the tokens of a group -> its states [T, D] fp32. path: where they are on disk.
    """

    def __init__(self, path: Path, layers: int):
        self.path, self.layers = path, layers
        self.kept: dict[tuple[int, ...], Tensor] = torch.load(path) if path.exists() else {}
        self.found: Tensor | None = None  # of the row that is computed, [1, T, D]
        self.row: Tensor | None = None  # what its lower layers have given, where nothing was found

    def used_by(self, model: PackedModel) -> PackedModel:
        """The model, whose lower layers compute only what is not kept, and keep it."""
        lower = model.layers()[: -self.layers]
        for number, layer in enumerate(lower):
            last = number == len(lower) - 1
            vars(layer)["forward"] = partial(self.layer, layer.forward, number == 0, last)
        vars(model)["hidden_states"] = partial(self.hidden_states, model.hidden_states)
        return model

    def layer(self, forward: Any, first: bool, last: bool, hidden: Tensor, *args, **kwargs) -> Any:
        if self.found is not None:
            return self.found if first else hidden
        computed = forward(hidden, *args, **kwargs)
        if last:
            self.row = computed.detach()
        return computed

    def hidden_states(
        self, compute: Any, input_ids: Tensor, position_ids: Tensor, *, segments: Segments
    ) -> Tensor:
        spans = group_spans(segments)
        tokens = [tuple(input_ids[0, begin:end].tolist()) for begin, end in spans]
        known = all(group in self.kept for group in tokens)
        self.found = torch.cat([self.kept[group] for group in tokens])[None] if known else None
        hidden = compute(input_ids, position_ids, segments=segments)
        if self.row is not None:
            for group, (begin, end) in zip(tokens, spans, strict=True):
                self.kept[group] = self.row[0, begin:end].clone()
        self.found = self.row = None
        return hidden

    @torch.no_grad()
    def compute(self, model: PackedModel, rows: Iterable[PackedRow]) -> None:
        """Keeps the states of these rows, and saves them now and then."""
        for number, row in enumerate(rows, 1):
            before = len(self.kept)
            model.hidden_states(row.input_ids, row.position_ids, segments=row.segments)
            if len(self.kept) > before and number % SAVED_EVERY == 0:
                self.save()
                print(f"{number} rows", flush=True)
        self.save()

    def save(self) -> None:
        partial_file = self.path.with_suffix(".partial")
        torch.save(self.kept, partial_file)
        partial_file.replace(self.path)


def group_spans(segments: Segments) -> list[tuple[int, int]]:
    """Tokens of a row's groups, which have two segments each: the prompt with the first response,
    and the second response.
    """
    ends = segments.cu_queries.tolist()
    return list(zip(ends[:-1:2], ends[2::2], strict=True))
