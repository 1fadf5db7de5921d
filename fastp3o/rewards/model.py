"""Scores of a reward model as rewards. The model may have another vocabulary than the policy."""

from itertools import groupby
from typing import cast

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedTokenizerBase

from fastp3o.data.chat_template import Piece, Pieces, name_pattern, special_tokens
from fastp3o.data.encoding import ids_added_first, split_bos, tokenise
from fastp3o.models.packed_model import PackedModel, scores
from fastp3o.models.sharding import FrozenModel
from fastp3o.packing.pack import Packing, by_group, pack
from fastp3o.packing.packed_row import Ids
from fastp3o.rollouts.groups import Group, Prompt, token_ids


class ModelReward:
    """Scores of a reward model.

    device: of the computation. mesh: of processes over which the model is spread; None for one. offload: keeps the
    model on the CPU between uses.
    """

    def __init__(
        self,
        model: PackedModel,
        tokenizer: PreTrainedTokenizerBase,
        policy_tokenizer: PreTrainedTokenizerBase,
        *,
        device: torch.device,
        packing: Packing,
        mesh: DeviceMesh | None = None,
        offload: bool = False,
    ):
        self.model = FrozenModel(model, device, mesh, offload=offload)
        self.device, self.packing = device, packing
        self.shares_vocabulary = tokenizer.get_vocab() == policy_tokenizer.get_vocab()
        self.translate = Translation(policy_tokenizer, tokenizer)

    def __call__(self, groups: list[Group]) -> Tensor:
        prompt_ids, response_ids = token_ids(groups) if self.shares_vocabulary else self.translate(groups)
        rows = [row.to(self.device) for row in pack(prompt_ids, response_ids, self.packing)]
        return by_group(rows, self.model.map_rows(rows, scores)).cpu()


class Translation:
    """Texts of a policy in the tokens of another model, as the loader makes them of that model's training data."""

    def __init__(self, policy: PreTrainedTokenizerBase, own: PreTrainedTokenizerBase):
        self.policy, self.own = policy, own
        self.first_ids = ids_added_first(own)
        self.controls = control_tokens(policy)
        self.names = name_pattern([*self.controls.values(), *control_tokens(own).values()])

    def __call__(self, groups: list[Group]) -> tuple[list[Ids], list[list[Ids]]]:
        """The ids of prompts and responses; a response keeps its end if it had one."""
        prompt_ids = [self.with_first_ids(ids) for ids in tokenise(self.own, [self.pieces(g.prompt) for g in groups])]
        return prompt_ids, list(map(self.response_ids, groups))

    def response_ids(self, group: Group) -> list[Ids]:
        # Names of special tokens in a response are text, as the policy wrote it.
        response_ids = tokenise(self.own, [(Piece(response.text, control=False),) for response in group.responses])
        for ids, response in zip(response_ids, group.responses, strict=True):
            if response.finished or not ids:
                ids.append(self.own.eos_token_id)
        return response_ids

    def pieces(self, prompt: Prompt) -> Pieces:
        """The prompt's pieces. A special token's name is only text if the prompt's ids say that it is to the policy."""
        text = prompt.text
        found = list(self.names.finditer(text))
        controls = self.control_flags(prompt.ids)
        # Tokens that the tokenizer itself puts first are not in the text.
        controls = controls[len(controls) - len(found) :]
        if not any(controls):
            return (Piece(text, control=False),)
        pieces, start = [], 0
        for name, control in zip(found, controls, strict=False):
            if not control:
                pieces += [Piece(text[start : name.start()], control=True), Piece(name.group(), control=False)]
                start = name.end()
        pieces.append(Piece(text[start:], control=True))
        return tuple(piece for piece in pieces if piece.text)

    def control_flags(self, ids: Ids) -> list[bool]:
        """Whether each name of a special token in the text of these ids is that token."""
        controls: list[bool] = []
        for control, run in groupby(ids, self.controls.__contains__):
            numbers = list(run)
            if control:
                controls += [True] * len(numbers)
            else:
                text = cast(str, self.policy.decode(numbers, clean_up_tokenization_spaces=False))
                controls += [False] * len(self.names.findall(text))
        return controls

    def with_first_ids(self, ids: Ids) -> Ids:
        """The ids after the tokens that the tokenizer puts first, unless a chat template has put one there."""
        first, rest = split_bos(ids, self.own.bos_token_id)
        return (first or self.first_ids) + rest


def control_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[int, str]:
    """The special tokens by id, without the one for an unknown character, which is text."""
    return {number: name for number, name in special_tokens(tokenizer).items() if number != tokenizer.unk_token_id}
