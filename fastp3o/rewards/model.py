"""Rewards by models: the scores of a reward model, which may have another vocabulary."""

import json
import re
from typing import cast

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedTokenizerBase

from fastp3o.data.encoding import ids_added_first, name_pattern, response_ends, split_bos
from fastp3o.data.tokens import BEGINNING, Continuation, special_tokens
from fastp3o.models.overflow import Overflow, first_overflow, overflow_in_fp16
from fastp3o.models.packed_model import PackedModel, scores
from fastp3o.models.sharding import FrozenModel, with_tensor_group
from fastp3o.packing.pack import Packing, by_group, pack
from fastp3o.packing.packed_row import Ids, PackedRow
from fastp3o.rollouts.groups import Group, Prompt, token_ids


class ModelReward:
    """Scores of a reward model. device: of the computation. mesh: of processes over which the model is spread; None for
    one. offload: keeps the model on the CPU between uses.
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
        groups, own = with_tensor_group(self.model.model, groups)
        rows = self.rows(groups)
        return by_group(rows, self.model.map_rows(rows, scores))[own].cpu()

    def rows(self, groups: list[Group]) -> list[PackedRow]:
        prompt_ids, response_ids = self.closed(groups) if self.shares_vocabulary else self.translate(groups)
        return [row.to(self.device) for row in pack(prompt_ids, response_ids, self.packing)]

    def overflow(self, groups: list[Group]) -> Overflow | None:
        """What fp16 does not hold where these groups are scored, on any process: all must call it."""
        groups, _ = with_tensor_group(self.model.model, groups)
        return first_overflow(self.model.map_rows(self.rows(groups), overflow_in_fp16))

    def closed(self, groups: list[Group]) -> tuple[list[Ids], list[list[Ids]]]:
        """The ids of prompts and responses. A response that has ended, by whichever of the policy's ends, ends as those
        that the model was trained on.
        """
        prompt_ids, response_ids = token_ids(groups)
        for (prompt, responses), ids in zip(groups, response_ids, strict=True):
            closing = self.translate.closing(prompt)
            for place, response in enumerate(responses):
                if response.finished:
                    ended = response.ids[-1] in self.translate.no_text  # otherwise by a text
                    ids[place] = [*(response.ids[:-1] if ended else response.ids), closing]
        return prompt_ids, response_ids


class Translation:
    """Texts of a policy in the tokens of another model, as the loader makes them of that model's training data."""

    def __init__(self, policy: PreTrainedTokenizerBase, scorer: PreTrainedTokenizerBase):
        self.policy, self.scorer = policy, scorer
        self.first_ids, self.continuation = ids_added_first(scorer), Continuation(scorer)
        self.controls = control_tokens(policy)
        names = set(self.controls.values())
        self.names = name_pattern(names)
        self.ends = response_ends(scorer)
        self.policys_first = ids_added_first(policy)
        self.no_text = {*self.controls, *response_ends(policy).ids}
        self.foreign = re.compile(f"({name_pattern(set(control_tokens(scorer).values()) - names).pattern})")

    def __call__(self, groups: list[Group]) -> tuple[list[Ids], list[list[Ids]]]:
        """The ids of prompts and responses; a response keeps its end if it had one."""
        prompt_ids = [self.prompt_ids(group.prompt) for group in groups]
        return prompt_ids, [self.response_ids(*one) for one in zip(groups, prompt_ids, strict=True)]

    def response_ids(self, group: Group, prompt_ids: Ids) -> list[Ids]:
        # Names of special tokens in a response are text, as the policy wrote it.
        texts = [response.text for response in group.responses]
        response_ids = self.continuation.ids(texts, prompt_ids[-1] if prompt_ids else BEGINNING, control=False)
        for ids, response in zip(response_ids, group.responses, strict=True):
            if response.finished or not ids:
                ids.append(self.closing(group.prompt))
        return response_ids

    def closing(self, prompt: Prompt) -> int:
        """The token with which the loader closes a response to this prompt: to messages, or to text."""
        if prompt.given:
            messages = not isinstance(json.loads(prompt.given)["prompt"], str)
        else:  # no text has special tokens, but for those that the tokenizer puts first
            messages = any(number in self.controls for number in prompt.ids[len(self.policys_first) :])
        return cast(int, self.ends.chat if messages else self.ends.text)

    def prompt_ids(self, prompt: Prompt) -> Ids:
        """The prompt's ids after the tokens that the tokenizer puts first, unless a chat template has put one there.
        Where a chat template wrote the prompt, all names of the policy's special tokens in it are tokens to the policy,
        in plain text none is. A name that only the other model has a token for is text.
        """
        decoded = cast(str, self.policy.decode(prompt.ids, clean_up_tokenization_spaces=False))
        tokens = sum(number in self.controls for number in prompt.ids)
        templated = self.names.search(prompt.text) and len(self.names.findall(decoded)) == tokens
        # Every second part is the name of a token that only the other model has.
        parts = self.foreign.split(prompt.text) if templated else ["", prompt.text]
        ids: Ids = []
        for place, part in enumerate(parts):
            last = ids[-1] if ids else BEGINNING
            ids += self.continuation.ids([part], last, control=place % 2 == 0)[0] if part else []
        first, rest = split_bos(ids, self.scorer.bos_token_id)
        return (first or self.first_ids) + rest


def control_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[int, str]:
    """The special tokens by id, without the one for an unknown character, which is text."""
    return {number: name for number, name in special_tokens(tokenizer).items() if number != tokenizer.unk_token_id}
