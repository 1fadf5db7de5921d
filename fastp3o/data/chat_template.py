"""Writes messages as text with a tokenizer's chat template; only the template's own special tokens count as such.

An outline is the text of the same messages with a mark in place of each content. It tells what the template wrote.
"""

import json
import re
from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple, cast

from transformers import PreTrainedTokenizerBase

from fastp3o.data.errors import Found, RecordError, UnskippableError
from fastp3o.data.layouts import Message, Part
from fastp3o.named_function import TookTooLongError, time_limit

CALLS = "tool_calls"
TIME_LIMIT = 10.0  # seconds for one text
# Characters for private use, which neither templates nor tokenizers know.
MARK = re.compile("\ue000(\\d+)\ue001")


class Piece(NamedTuple):
    """A stretch of text. control: whether a special token's text in it is that token, or only text."""

    text: str
    control: bool


# Consecutive pieces of one text.
Pieces = tuple[Piece, ...]


def written(pieces: Pieces) -> str:
    return "".join(piece.text for piece in pieces)


def special_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[int, str]:
    """The tokens that are no text, by their ids."""
    named = dict(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True))
    return named | {number: token.content for number, token in tokenizer.added_tokens_decoder.items() if token.special}


def name_pattern(names: Iterable[str]) -> re.Pattern[str]:
    """A pattern that finds each of the names, the longest one if several begin at a place."""
    return re.compile("|".join(map(re.escape, sorted(names, key=len, reverse=True))) or r"(?!)")


class ChatTemplate:
    """The chat template of a tokenizer.

    Methods raise RecordError if the template refuses messages, leaves one out, or changes a content that holds the text
    of a special token.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self.tokenizer = tokenizer
        self.special = name_pattern(special_tokens(tokenizer).values())
        # Most conversations have the same roles as an earlier one, and so the same outline.
        self.outline = lru_cache(maxsize=1024)(self.new_outline)

    def holds_special_text(self, pieces: Pieces) -> bool:
        """Whether a piece that is only text holds the text of a special token."""
        return any(not piece.control and self.special.search(piece.text) for piece in pieces)

    def prompt(self, prompt: Part) -> Pieces:
        """The text of the messages and of the beginning of the reply."""
        conversation, field = cast(list[Message], prompt.value), prompt.field
        text = self.apply(conversation, field, add_generation_prompt=True)
        outline = self.conversation_outline(conversation, add_generation_prompt=True)
        for number, message in enumerate(conversation):
            self.check_message(message, number, f"{field}[{number}]", text, outline)
        self.check_calls(conversation, field, text, add_generation_prompt=True)
        return self.pieces(text, outline, conversation, field)

    def reply(self, prompt: Part, before: Pieces, reply: Part) -> Pieces:
        """The text of the last message, which is the difference of the texts with and without it."""
        asked = cast(list[Message], prompt.value)
        conversation = [*asked, *cast(list[Message], reply.value)]
        text, start = self.apply(conversation, reply.field, add_generation_prompt=False), written(before)
        if not text.startswith(start):
            expected = "a chat template that writes the messages before a reply the same with and without the reply"
            raise RecordError(reply.field, expected, Found("one that changes them"))
        outline = self.conversation_outline(conversation, add_generation_prompt=False)
        self.check_message(conversation[-1], len(asked), reply.field, text, outline)
        self.check_calls(conversation, reply.field, text, add_generation_prompt=False)
        outline_before = self.conversation_outline(asked, add_generation_prompt=True)
        if outline is not None and outline_before is not None and outline.startswith(outline_before):
            outline = outline[len(outline_before) :]
        else:
            outline = None
        return self.pieces(text[len(start) :], outline, conversation, reply.field)

    def check_message(self, message: Message, number: int, field: str, text: str, outline: str | None) -> None:
        """Raises RecordError if the template drops the content, or another field of the message has a special token."""
        content = message["content"].strip()
        if content not in text if outline is None else content and mark(number) not in outline:
            role = message["role"][:40]
            raise RecordError(field, "a message that the chat template writes", Found(f"one of '{role}' that it drops"))
        others = json.dumps({k: v for k, v in message.items() if k != "content"}, ensure_ascii=False, default=str)
        if self.special.search(others):
            raise RecordError(field, "special tokens, if any, in the content alone", Found("one in another field"))

    def check_calls(self, conversation: list[Message], field: str, text: str, *, add_generation_prompt: bool) -> None:
        """Raises RecordError if the text is the same without the calls of tools."""
        if not any(message.get(CALLS) for message in conversation):
            return
        without = [{name: value for name, value in each.items() if name != CALLS} for each in conversation]
        try:
            told = self.apply(without, field, add_generation_prompt=add_generation_prompt) != text
        except UnskippableError:
            raise
        except RecordError:  # the template needs them
            return
        if not told:
            raise RecordError(field, "messages that the chat template writes", Found(f"{CALLS} that it drops"))

    def pieces(self, text: str, outline: str | None, conversation: list[Message], field: str) -> Pieces:
        """The text in one piece, or cut at the ends of contents if these hold special tokens' text."""
        own = 0 if outline is None else len(self.special.findall(outline))
        if len(self.special.findall(text)) <= own:
            return (Piece(text, True),)
        if outline is None and not any(self.special.search(message["content"]) for message in conversation):
            return (Piece(text, True),)
        parts = MARK.split(outline or "")
        # Every second one is the number of a message. Templates write contents as they are, or trimmed.
        versions = [
            dict.fromkeys((content, content.strip())) if number % 2 else (part,)
            for number, part in enumerate(parts)
            for content in [conversation[int(part)]["content"] if number % 2 else ""]
        ]
        found = re.fullmatch("".join(f"({'|'.join(map(re.escape, either))})" for either in versions), text)
        if found is None:
            expected = "no special token's text in content, which this chat template changes so that they look alike"
            raise RecordError(field, expected, Found("some"))
        return tuple(Piece(part, number % 2 == 0) for number, part in enumerate(found.groups()) if part)

    def conversation_outline(self, conversation: list[Message], *, add_generation_prompt: bool) -> str | None:
        """The template's text around the contents; None if it refuses marks in their place."""
        marked = [
            {**message, "content": mark(number) if message["content"] else ""}
            for number, message in enumerate(conversation)
        ]
        return self.outline(json.dumps(marked, default=str), add_generation_prompt)

    def new_outline(self, conversation: str, add_generation_prompt: bool) -> str | None:
        try:
            return self.apply(json.loads(conversation), "", add_generation_prompt=add_generation_prompt)
        except UnskippableError:
            raise
        except RecordError:
            return None

    def apply(self, conversation: list[Message], field: str, *, add_generation_prompt: bool) -> str:
        accepted = "messages that the chat template accepts"
        try:
            with time_limit(TIME_LIMIT):
                text = self.tokenizer.apply_chat_template(
                    conversation, tokenize=False, add_generation_prompt=add_generation_prompt
                )
            return cast(str, text)
        except TookTooLongError as error:
            raise UnskippableError(field, accepted, Found(f"no end of its work after {TIME_LIMIT:g} s")) from error
        except Exception as error:  # a template is a program of the model's author and may raise anything
            raise RecordError(field, accepted, Found(f"its refusal: {error}")) from error


def mark(number: int) -> str:
    return f"\ue000{number}\ue001"
