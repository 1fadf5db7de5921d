"""Writes messages as text with a tokenizer's chat template. No message can hold or make a special token's text.

An outline is the text of the same messages with a mark in place of each content. It tells what the template wrote.
"""

import json
import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import cast

from transformers import PreTrainedTokenizerBase

from fastp3o.data.errors import Found, RecordError, UnskippableError
from fastp3o.data.layouts import Message, Part
from fastp3o.named_function import TookTooLongError, time_limit

CALLS = "tool_calls"
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
    a message, which could end its turn and begin another.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self.tokenizer = tokenizer
        self.special = name_pattern(special_tokens(tokenizer).values())
        # Most conversations have the same roles as an earlier one, and so the same outline.
        self.outline = lru_cache(maxsize=1024)(self.new_outline)

    def prompt(self, prompt: Part) -> str:
        """The text of the messages and of the beginning of the reply."""
        conversation, field = cast(list[Message], prompt.value), prompt.field
        text = self.apply(conversation, field, add_generation_prompt=True)
        fields = {number: f"{field}[{number}]" for number in range(len(conversation))}
        self.check_messages(conversation, fields, text, add_generation_prompt=True)
        self.check_calls(conversation, field, text, add_generation_prompt=True)
        return text

    def reply(self, prompt: Part, before: str, reply: Part) -> str:
        """The text of the last message, which is the difference of the texts with and without it."""
        asked = cast(list[Message], prompt.value)
        conversation = [*asked, *cast(list[Message], reply.value)]
        text = self.apply(conversation, reply.field, add_generation_prompt=False)
        if not text.startswith(before):
            expected = "a chat template that writes the messages before a reply the same with and without the reply"
            raise RecordError(reply.field, expected, Found("one that changes them"))
        self.check_messages(conversation, {len(asked): reply.field}, text, add_generation_prompt=False)
        self.check_calls(conversation, reply.field, text, add_generation_prompt=False)
        return text[len(before) :]

    def check_messages(
        self, conversation: list[Message], fields: Mapping[int, str], text: str, *, add_generation_prompt: bool
    ) -> None:
        """Raises RecordError if the template drops one of the messages with these numbers, or if one holds the text of
        a special token, or a part that the template completes.
        """
        marked = [
            {**message, "content": mark(number) if message["content"] else ""}
            for number, message in enumerate(conversation)
        ]
        outline = self.outline(json.dumps(marked, default=str), add_generation_prompt)
        completed = outline is not None and len(self.special.findall(text)) > len(self.special.findall(outline))
        for number, field in fields.items():
            message = conversation[number]
            content = message["content"].strip()
            if content not in text if outline is None else content and mark(number) not in outline:
                found = Found(f"one of '{message['role'][:40]}' that it drops")
                raise RecordError(field, "a message that the chat template writes", found)
            if completed or self.special.search(content + json.dumps(message, ensure_ascii=False, default=str)):
                raise RecordError(field, "a message without the text of a special token", Found("one with it"))

    def check_calls(self, conversation: list[Message], field: str, text: str, *, add_generation_prompt: bool) -> None:
        """Raises RecordError if the text is the same without the calls of tools."""
        if not any(message.get(CALLS) for message in conversation):
            return
        without = [{name: value for name, value in one.items() if name != CALLS} for one in conversation]
        try:
            same = self.apply(without, field, add_generation_prompt=add_generation_prompt) == text
        except UnskippableError:
            raise
        except RecordError:  # the template needs them
            return
        if same:
            raise RecordError(field, "messages that the chat template writes", Found(f"{CALLS} that it drops"))

    def new_outline(self, conversation: str, add_generation_prompt: bool) -> str | None:
        """The template's text of marked messages, in JSON; None if it refuses marks in the place of contents."""
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
    """Characters for private use, which neither templates nor tokenizers know."""
    return f"\ue000{number}\ue001"
