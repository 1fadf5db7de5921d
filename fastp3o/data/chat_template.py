"""Writes messages as text with a tokenizer's chat template. No message can hold or make a special token's text.

An outline is the text of the same messages with a mark in place of each content. It tells what the template wrote.
"""

import json
import re
from collections.abc import Iterable
from typing import cast

from transformers import PreTrainedTokenizerBase

from fastp3o.data.errors import DataError, Found, RecordError
from fastp3o.data.layouts import Message, Part
from fastp3o.named_function import TookTooLongError, time_limit

TIME_LIMIT = 10.0  # seconds for one text


def special_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[int, str]:
    """The tokens that are no text, by their ids."""
    named = dict(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True))
    return named | {number: token.content for number, token in tokenizer.added_tokens_decoder.items() if token.special}


def name_pattern(names: Iterable[str]) -> re.Pattern[str]:
    """A pattern that finds each of the names, the longest one if several begin at a place."""
    return re.compile("|".join(map(re.escape, sorted(names, key=len, reverse=True))) or r"(?!)")


class ChatTemplate:
    """The chat template of a tokenizer.

    Methods raise RecordError if the template refuses messages or leaves one out, and for the text of a special token in
    a message, which could end its turn and begin another; DataError if the template does not end.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self.tokenizer = tokenizer
        self.special = name_pattern(special_tokens(tokenizer).values())

    def prompt(self, prompt: Part) -> str:
        """The text of the messages and of the beginning of the reply."""
        conversation = cast(list[Message], prompt.value)
        text = self.apply(conversation, prompt.field, add_generation_prompt=True)
        self.check(conversation, 0, prompt.field, text, add_generation_prompt=True)
        return text

    def reply(self, prompt: Part, before: str, reply: Part) -> str:
        """The text of the last message, which is the difference of the texts with and without it."""
        asked = cast(list[Message], prompt.value)
        conversation = [*asked, *cast(list[Message], reply.value)]
        text = self.apply(conversation, reply.field, add_generation_prompt=False)
        if not text.startswith(before):
            expected = "a chat template that writes the messages before a reply the same with and without the reply"
            raise RecordError(reply.field, expected, Found("one that changes them"))
        self.check(conversation, len(asked), reply.field, text, add_generation_prompt=False)
        return text[len(before) :]

    def check(
        self, conversation: list[Message], first: int, field: str, text: str, *, add_generation_prompt: bool
    ) -> None:
        """Raises RecordError if the template drops one of the messages from the first on, or calls of tools; or if one
        holds the text of a special token, or a part that the template completes.
        """
        # Characters for private use, which neither templates nor tokenizers know.
        marks = [f"\ue000{number}\ue001" if one["content"] else "" for number, one in enumerate(conversation)]
        marked = [{**one, "content": mark} for one, mark in zip(conversation, marks, strict=True)]
        outline = self.apply(marked, field, add_generation_prompt=add_generation_prompt)
        completed = len(self.special.findall(text)) > len(self.special.findall(outline))
        for message, mark in zip(conversation[first:], marks[first:], strict=True):
            if message["content"].strip() and mark not in outline:
                found = Found(f"one of '{message['role'][:40]}' that it drops")
                raise RecordError(field, "a message that the chat template writes", found)
            written = message["content"] + json.dumps(message, ensure_ascii=False, default=str)
            if completed or self.special.search(written):
                raise RecordError(field, "a message without the text of a special token", Found("one with it"))
        if any(message.get("tool_calls") for message in conversation):
            without = [{name: value for name, value in one.items() if name != "tool_calls"} for one in conversation]
            try:
                same = self.apply(without, field, add_generation_prompt=add_generation_prompt) == text
            except RecordError:  # the template needs them
                return
            if same:
                raise RecordError(field, "messages that the chat template writes", Found("tool_calls that it drops"))

    def apply(self, conversation: list[Message], field: str, *, add_generation_prompt: bool) -> str:
        try:
            with time_limit(TIME_LIMIT):
                text = self.tokenizer.apply_chat_template(
                    conversation, tokenize=False, add_generation_prompt=add_generation_prompt
                )
            return cast(str, text)
        except TookTooLongError as error:  # the next records would take as long, so none is skipped
            raise DataError(f"the chat template has not ended after {TIME_LIMIT:g} s, for field '{field}'") from error
        except Exception as error:  # a template is a program of the model's author and may raise anything
            raise RecordError(
                field, "messages that the chat template accepts", Found(f"its refusal: {error}")
            ) from error
