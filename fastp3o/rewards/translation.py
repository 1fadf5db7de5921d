"""Texts of a policy in the tokens of another model, as the loader makes them of the data that the model trains on."""

from itertools import groupby
from typing import cast

from transformers import PreTrainedTokenizerBase

from fastp3o.data.chat_template import Piece, Pieces, any_of, special_tokens
from fastp3o.data.encoding import ids_added_first, split_bos, tokenise
from fastp3o.rollouts.rollouts import Rollouts


class Translation:
    """From the tokenizer of a policy to the model's own."""

    def __init__(self, policy: PreTrainedTokenizerBase, own: PreTrainedTokenizerBase):
        self.policy, self.own = policy, own
        self.first_ids = ids_added_first(own)
        self.controls = control_tokens(policy)
        self.names = any_of([*self.controls.values(), *control_tokens(own).values()])

    def __call__(self, rollouts: Rollouts) -> tuple[list[list[int]], list[list[list[int]]]]:
        """The ids of prompts and responses; a response keeps its end where it had one."""
        prompts = [self.pieces(*prompt) for prompt in zip(rollouts.prompts, rollouts.prompt_ids, strict=True)]
        prompt_ids = [self.with_first_ids(ids) for ids in tokenise(self.own, prompts)]
        # What looks like a special token in a response is text, as the policy wrote it.
        response_ids = [
            tokenise(self.own, [(Piece(response, control=False),) for response in group])
            for group in rollouts.responses
        ]
        for group, group_finished in zip(response_ids, rollouts.finished, strict=True):
            for ids, finished in zip(group, group_finished, strict=True):
                if finished or not ids:
                    ids.append(self.own.eos_token_id)
        return prompt_ids, response_ids

    def pieces(self, prompt: str, ids: list[int]) -> Pieces:
        """A prompt, in which the names of special tokens are text where they are to the policy, whose ids tell."""
        found = list(self.names.finditer(prompt))
        controls = self.controls_of(ids)
        controls = controls[len(controls) - len(found) :]  # what the tokenizer itself puts first is not in the text
        if not any(controls):
            return (Piece(prompt, control=False),)
        pieces, start = [], 0
        for name, control in zip(found, controls, strict=False):
            if not control:
                pieces += [Piece(prompt[start : name.start()], control=True), Piece(name.group(), control=False)]
                start = name.end()
        pieces.append(Piece(prompt[start:], control=True))
        return tuple(piece for piece in pieces if piece.text)

    def controls_of(self, ids: list[int]) -> list[bool]:
        """Of each name of a special token that is read in a prompt of these ids, whether it is that token."""
        controls: list[bool] = []
        for control, run in groupby(ids, self.controls.__contains__):
            numbers = list(run)
            if control:
                controls += [True] * len(numbers)
            else:
                text = cast(str, self.policy.decode(numbers, clean_up_tokenization_spaces=False))
                controls += [False] * len(self.names.findall(text))
        return controls

    def with_first_ids(self, ids: list[int]) -> list[int]:
        """What a chat template has put first is not put there twice."""
        first, rest = split_bos(ids, self.own.bos_token_id)
        return (first or self.first_ids) + rest


def control_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[int, str]:
    """An unknown character has a special token too, and is text."""
    return {number: name for number, name in special_tokens(tokenizer).items() if number != tokenizer.unk_token_id}
