"""Texts as token ids, and ids as texts: alone, or behind other text."""

from collections.abc import Iterator
from typing import cast

from transformers import PreTrainedTokenizerBase

# In the place of the token before a text: there is none, or any that is no special one.
BEGINNING, INSIDE = -1, -2

# Texts whose tokens are tried as anchors before the characters of the vocabulary: of private use,
# it is part of no longer token.
PRIVATE = "\ue000"
MOST_ANCHORS = 4


def special_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[int, str]:
    """The tokens that are no text, by their ids."""
    named = dict(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True))
    return named | {
        number: token.content
        for number, token in tokenizer.added_tokens_decoder.items()
        if token.special
    }


def tokenize(
    tokenizer: PreTrainedTokenizerBase, texts: list[str], *, control: bool
) -> list[list[int]]:
    """The ids of texts, without what the tokenizer adds. control: whether a special token's text is
    that token.
    """
    # A tokenizer file may switch padding and truncation on.
    options = {
        "padding": False,
        "truncation": False,
        "return_attention_mask": False,
        "verbose": False,
    }
    if not texts:
        return []
    return tokenizer(
        texts, add_special_tokens=False, split_special_tokens=not control, **options
    ).input_ids


def text_of_ids(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> str:
    """The text without special tokens, with all its spaces: a tokenizer file may ask to clean them
    up.
    """
    return cast(
        str, tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    )


class Continuation:
    """The ids of texts that continue others, and the texts of such ids.

    SentencePiece puts a space, the dummy prefix, before a text, and some tokenizers before what
    follows a special token. Of what continues a text that space is no part: prompt and response
    would be other text than their record has. Decoding takes a first space off for it, which would
    be a part of a response. Trials tell once what the tokenizer does: ids behind an anchor, a text
    whose tokens stay apart from those that follow, are what continues it.

    last: the token before, BEGINNING, or INSIDE of a text. For most tokenizers, which put nothing
    before a text, it changes nothing.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self.tokenizer = tokenizer
        self.added = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder} - {
            tokenizer.unk_token_id
        }
        # The anchors with their tokens; none for a tokenizer without a prefix.
        self.anchors: list[tuple[str, list[int]]] = []
        for text, ids, twice in anchors(tokenizer):
            if twice == ids + ids or len(self.anchors) == MOST_ANCHORS:
                break
            self.anchors.append((text, ids))
        # What a text begins behind.
        self.begins = {
            BEGINNING,
            *(self.added if self.anchors and self.prefixed_after_special() else ()),
        }
        self.letter = self.letter_before_texts()

    def prefixed_after_special(self) -> bool:
        text, ids = self.anchors[0]
        for number in sorted(self.added):
            name = cast(str, self.tokenizer.convert_ids_to_tokens(number))
            alone, behind = tokenize(self.tokenizer, [name, name + text], control=True)
            if alone == [number] and behind[:1] == alone:
                return behind[1:] == ids
        return False

    def letter_before_texts(self) -> list[int]:
        """The id of a letter, behind which a first space is decoded; none if it is also decoded
        without it.
        """
        for letter in "aeiost":
            one, spaced = self.ids([letter, f" {letter}"], INSIDE, control=False)
            alone = text_of_ids(self.tokenizer, spaced)
            behind = text_of_ids(self.tokenizer, [*one, *spaced])
            if len(one) == 1 and behind == f"{letter} {letter}":
                return [] if alone == f" {letter}" else one
        return []

    def ids(self, texts: list[str], last: int, *, control: bool) -> list[list[int]]:
        """Token ids of texts that follow a token, as `tokenize` gives them for texts alone."""
        ids_by_text: dict[str, list[int]] = {}
        for anchor, first in self.anchors if last not in self.begins else ():
            left = [text for text in texts if text not in ids_by_text]
            anchored = tokenize(self.tokenizer, [anchor + text for text in left], control=control)
            whole = zip(left, anchored, strict=True)
            ids_by_text |= {
                text: ids[len(first) :] for text, ids in whole if ids[: len(first)] == first
            }
        # No anchor stays apart from these.
        left = [text for text in texts if text not in ids_by_text]
        ids_by_text |= zip(left, tokenize(self.tokenizer, left, control=control), strict=True)
        return [list(ids_by_text[text]) for text in texts]

    def text(self, ids: list[int], last: int) -> str:
        """The text without special tokens: what other text and the ids behind it decode to, without
        the other text.
        """
        before = [] if last in self.begins else self.letter
        return text_of_ids(self.tokenizer, [*before, *ids])[len(before) :]

    def moved(self, ids: list[int]) -> list[int]:
        """Ids that begin a text as they are where they continue another."""
        end = next((place for place, number in enumerate(ids) if number in self.added), len(ids))
        text = text_of_ids(self.tokenizer, ids[:end]) if self.anchors else ""
        # Not all decode without the prefix.
        for one in (text.removeprefix(" "), text):
            (begun,), (continued,) = (
                self.ids([one], last, control=False) for last in (BEGINNING, INSIDE)
            )
            if begun == ids[:end]:
                return [*continued, *ids[end:]]
        return ids


def anchors(tokenizer: PreTrainedTokenizerBase) -> Iterator[tuple[str, list[int], list[int]]]:
    """Texts of one character whose tokens stay apart from the same ones behind them: with the ids
    of one and of two.
    """
    unknown = tokenizer.unk_token_id
    for text in characters(tokenizer):
        ids, twice = tokenize(tokenizer, [text, text + text], control=False)
        if ids and unknown not in ids and twice[: len(ids)] == ids and len(twice) > len(ids):
            yield text, ids, twice


def characters(tokenizer: PreTrainedTokenizerBase) -> Iterator[str]:
    yield PRIVATE
    yield from sorted(token for token in tokenizer.get_vocab() if len(token) == 1)
