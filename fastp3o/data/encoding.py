"""Makes token ids of texts or messages. Prompt and response are tokenized separately: no token is
part of both.

The tokenizer's chat template writes messages. None of them can hold or make a special token's text.
An outline, the text of the same messages with a mark in place of each content, tells what the
template wrote.
"""

import json
import operator
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from datetime import timedelta
from functools import cached_property
from itertools import islice
from typing import Any, NamedTuple, cast

from transformers import GenerationConfig, PretrainedConfig, PreTrainedTokenizerBase

from fastp3o.calls.time_limit import TookTooLongError, time_limit
from fastp3o.config import LONGEST_TEXT
from fastp3o.data.errors import DataError, Found, RecordError
from fastp3o.data.layouts import Fields, Message, Part
from fastp3o.data.tokens import BEGINNING, INSIDE, Continuation, special_tokens, tokenize
from fastp3o.errors import UserError
from fastp3o.runtime.clock import READS_CLOCK, Clock, process_clock

TIME_LIMIT = 10.0  # seconds for one text
# Fields of a record that its chat template reads, beside the messages.
TEMPLATE_FIELDS = ("tools", "chat_template_kwargs")
# Variables that are no setting of a record's.
RESERVED = ("messages", "add_generation_prompt", "chat_template", "tokenize", READS_CLOCK)
NO_FIELDS: Fields = {}
# Fields of a message that are part of what its author says. A template may leave them out of
# earlier turns, but a reply without them would teach something else.
SAID = ("reasoning_content", "reasoning", "thinking", "function_call")
CHECKED = ("role", "content", "tool_calls")  # what is dropped of these is an error in any message
# Differs in every directive of a clock.
ANOTHER_TIME = timedelta(days=401, hours=13, minutes=11, seconds=7)


def name_pattern(names: Iterable[str]) -> re.Pattern[str]:
    """A pattern that finds each of the names, the longest one if several begin at a place."""
    return re.compile("|".join(map(re.escape, sorted(names, key=len, reverse=True))) or r"(?!)")


class BetweenTurns(NamedTuple):
    """The text that a chat template writes between two replies. before: the messages up to the
    first one, which are marks. written_before: them, as the template writes them. between: from
    there to the content of a message of this role; after: from there to the next reply, with what
    the template begins it with.
    """

    role: str
    variables: Fields
    before: list[Message]
    written_before: str
    between: str
    after: str


# --- messages: what a chat template writes --------------------------------------------------------


class ChatTemplate:
    """The chat template of a tokenizer.

    settings: variables that the template reads (`enable_thinking`), where a record's own do not say
    otherwise. clock: that it reads; by default the process's. Methods raise RecordError if the
    template refuses messages or leaves one out, and for the text of a special token in a message,
    which could end its turn and begin another; DataError if the template does not end. `variables`
    are what the function of that name returns. unread: names of messages' fields that it has
    written nowhere, in their order.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        settings: Mapping[str, Any] | None = None,
        clock: Clock | None = None,
    ):
        self.tokenizer = tokenizer
        self.settings = settings or {}
        self.clock = clock or process_clock()
        self.unread: dict[str, None] = {}
        self.read: set[str] = set()
        self.special = name_pattern(special_tokens(tokenizer).values())
        if self.settings:
            if tokenizer.chat_template is None:
                raise UserError(
                    "--chat_template_kwargs: the tokenizer has no chat template that could read them"
                )
            try:
                self.require_read({}, [])
            except RecordError as unread:
                raise UserError(
                    f"--chat_template_kwargs: {unread.reason}, got {unread.got}"
                ) from None

    # --- what the template reads and how it ends --------------------------------------------------

    def closing(self) -> int | None:
        """The token with which the template ends a reply: the first special one that it writes
        after it. None if it writes none there, or refuses a conversation of two messages.
        """
        marks = ("\ue0000\ue001", "\ue0001\ue001")
        messages = [
            {"role": role, "content": mark}
            for role, mark in zip(("user", "assistant"), marks, strict=True)
        ]
        try:
            text = self.apply(messages, "messages", self.settings, add_generation_prompt=False)
        except RecordError:
            return None
        _, written, after = text.rpartition(marks[1])
        # One token may be the end of sequence and unknown characters.
        special = special_tokens(self.tokenizer).keys() - {self.tokenizer.unk_token_id} | {
            self.tokenizer.eos_token_id
        }
        (ids,) = tokenize(self.tokenizer, [after if written else ""], control=True)
        return next((number for number in ids if number in special), None)

    def variables(self, record: Fields) -> dict[str, Any]:
        """The variables that the template reads besides messages: `tools`, and the values of
        `chat_template_kwargs`. Raises RecordError for one that the template does not name.
        """
        tools = json_value(record, "tools", list, "a list of tools")
        variables = json_value(record, "chat_template_kwargs", dict, "an object")
        if not tools and not variables:
            return {**self.settings}
        self.require_read(variables, tools)
        for field, value in (("tools", tools), ("chat_template_kwargs", variables)):
            if self.special.search(json.dumps(value, ensure_ascii=False, default=str)):
                raise RecordError(field, "no text of a special token", Found("one with it"))
        return {**self.settings, **variables} | ({"tools": tools} if tools else {})

    def require_read(self, own: Fields, tools: list) -> None:
        """Raises RecordError unless the template names all settings, a record's own, and tools if
        there are some.
        """
        places = {name: f"chat_template_kwargs.{name}" for name in [*self.settings, *own]}
        for name, place in (places | ({"tools": "tools"} if tools else {})).items():
            if not self.reads(name, tools):
                raise RecordError(
                    place, "what the chat template reads", Found("a name that is not in it")
                )

    def reads(self, name: str, tools: list) -> bool:
        """Whether the template names a variable that may be set. tools: of the record; some have a
        template for it.
        """
        template = self.tokenizer.get_chat_template(tools=tools or None)
        return name not in RESERVED and re.search(rf"\b{re.escape(name)}\b", template) is not None

    def fields_read(self, record: Fields) -> dict[str, Any]:
        """A record's fields for the template, without what it does not read. Raises RecordError as
        `variables`.
        """
        tools = json_value(record, "tools", list, "a list of tools")
        variables = json_value(record, "chat_template_kwargs", dict, "an object")
        variables = {name: value for name, value in variables.items() if self.reads(name, tools)}
        return {"chat_template_kwargs": variables} | (
            {"tools": tools} if self.reads("tools", tools) else {}
        )

    @cached_property
    def reads_clock(self) -> bool:
        """Whether the time changes what the template writes."""
        if READS_CLOCK not in str(self.tokenizer.chat_template):
            return False
        other = ChatTemplate(self.tokenizer, self.settings, Clock(self.clock.moment + ANOTHER_TIME))
        asked = [{"role": "user", "content": "Hi"}]
        try:
            texts = [
                template.apply(asked, "", self.settings, add_generation_prompt=True)
                for template in (self, other)
            ]
        except RecordError:  # it wants other messages
            return True
        return texts[0] != texts[1]

    # --- what it writes ---------------------------------------------------------------------------

    def prompt(self, prompt: Part, variables: Fields = NO_FIELDS) -> str:
        """The text of the messages and of the beginning of the reply."""
        conversation = cast(list[Message], prompt.value)
        text = self.apply(conversation, prompt.field, variables, add_generation_prompt=True)
        self.check(conversation, 0, prompt.field, text, variables, add_generation_prompt=True)
        return text

    def reply(self, prompt: Part, before: str, reply: Part, variables: Fields = NO_FIELDS) -> str:
        """The text of the last message, which is the difference of the texts with and without it."""
        asked = cast(list[Message], prompt.value)
        conversation = [*asked, *cast(list[Message], reply.value)]
        text = self.apply(conversation, reply.field, variables, add_generation_prompt=False)
        if not text.startswith(before):
            expected = "a chat template that writes the messages before a reply the same with and without the reply"
            raise RecordError(reply.field, expected, Found("one that changes them"))
        self.check(
            conversation, len(asked), reply.field, text, variables, add_generation_prompt=False
        )
        return text[len(before) :]

    def between_turns(self, role: str, variables: Fields) -> BetweenTurns:
        """The text that the template writes between two replies, with a message of this role. It is
        asked about marks.

        Raises RecordError for a template that refuses the role, or writes earlier replies, as they
        were begun and went on, otherwise once others follow them.
        """
        marks = [f"\ue000{number}\ue001" for number in range(7)]

        def conversation(*turns: str) -> list[Message]:
            roles = ("user", *("assistant", role) * (len(turns) // 2 + 1))
            return [
                {"role": one, "content": text}
                for one, text in zip(roles, (marks[0], *turns), strict=False)
            ]

        def written(*turns: str) -> str:
            return self.apply(conversation(*turns), role, variables, add_generation_prompt=True)

        before = written()
        head = written(marks[1], marks[2]).partition(marks[1])[0]
        # A reply may begin with what the template writes for it to continue from, such as an empty
        # thought.
        begun = before[len(head) :] if before.startswith(head) else ""
        thought = "<think>\n{}\n</think>\n\n"
        if "<think>" in begun:
            thought = "" if "</think>" in begun else "{}\n</think>\n\n"
        first, second = thought.format(marks[1]) + marks[2], thought.format(marks[3]) + marks[4]
        observed, last = marks[5:]
        turn = written(begun + first, observed)
        between, _, after = turn[len(before + first) :].partition(observed)
        up_to_second = before + first + between + observed + after
        turns = written(begun + first, observed, begun + second, last)
        if turn != up_to_second or turns != up_to_second + second + between + last + after:
            expected = f"a chat template that leaves a reply as it is once a message of role {role} follows it"
            raise RecordError(None, expected, Found("one that changes it"))
        return BetweenTurns(
            role, variables, conversation(begun + first), before + first, between, after
        )

    def content_between(self, turns: BetweenTurns, text: str) -> str:
        """The text as the template writes it in a message between turns: some cut white space off,
        or quote it.
        """
        messages = [*turns.before, {"role": turns.role, "content": text}]
        try:
            whole = self.apply(messages, turns.role, turns.variables, add_generation_prompt=True)
        except RecordError:
            return text
        start = turns.written_before + turns.between
        as_expected = whole.startswith(start) and whole[len(start) :].endswith(turns.after)
        return whole[len(start) : len(whole) - len(turns.after)] if as_expected else text

    # --- what it refuses, drops or changes --------------------------------------------------------

    def check(
        self,
        messages: list[Message],
        first: int,
        field: str,
        text: str,
        variables: Fields,
        add_generation_prompt: bool,
    ) -> None:
        """Raises RecordError if the template drops one of the messages from the first on, calls of
        tools, or what a reply says beside its content; or if one holds the text of a special token,
        or a part that the template completes. Notes which other fields it does not read.
        """
        # Characters for private use, which neither templates nor tokenizers know.
        marks = [
            f"\ue000{number}\ue001" if one["content"] else "" for number, one in enumerate(messages)
        ]
        marked = [{**one, "content": mark} for one, mark in zip(messages, marks, strict=True)]
        outline = self.apply(marked, field, variables, add_generation_prompt=add_generation_prompt)
        completed = len(self.special.findall(text)) > len(self.special.findall(outline))
        for message, mark in zip(messages[first:], marks[first:], strict=True):
            if message["content"].strip() and mark not in outline:
                dropped = Found(f"one of '{message['role'][:40]}' that it drops")
                raise RecordError(field, "a message that the chat template writes", dropped)
            written = message["content"] + json.dumps(message, ensure_ascii=False, default=str)
            if completed or self.special.search(written):
                raise RecordError(
                    field, "a message without the text of a special token", Found("one with it")
                )

        def drops(names: list[str], first: int = 0) -> bool:
            """Whether the text is the same without these fields of the messages from the first on."""
            later = [
                {name: value for name, value in message.items() if name not in names}
                for message in messages[first:]
            ]
            try:
                without = [*messages[:first], *later]
                return (
                    self.apply(
                        without, field, variables, add_generation_prompt=add_generation_prompt
                    )
                    == text
                )
            except RecordError:  # the template needs them
                return False

        if any(message.get("tool_calls") for message in messages) and drops(["tool_calls"]):
            raise RecordError(
                field, "messages that the chat template writes", Found("tool_calls that it drops")
            )
        if not add_generation_prompt:
            self.require_all_said(
                messages[-1], field, lambda names: drops(names, len(messages) - 1)
            )
        self.note_unread(
            messages[first:], self.tokenizer.get_chat_template(tools=variables.get("tools")), drops
        )

    def note_unread(
        self, messages: list[Message], source: str, drops: Callable[[list[str]], bool]
    ) -> None:
        """Notes which fields of messages the template reads, and which it does not. source: the
        template. drops: whether the text is the same without some fields.
        """
        has_value = [
            n for one in messages for n, value in one.items() if value not in (None, "", [], {})
        ]
        for name in dict.fromkeys(has_value):
            if name in CHECKED or name in self.read:
                continue
            if not re.search(rf"\b{re.escape(name)}\b", source) or (
                name not in SAID and drops([name])
            ):
                self.unread[name] = None
            else:
                self.read.add(name)
                self.unread.pop(name, None)

    def require_all_said(
        self, reply: Message, field: str, drops: Callable[[list[str]], bool]
    ) -> None:
        """Raises RecordError if the template drops what the reply says beside its content. One text
        may have several names.
        """
        said = {
            name: json.dumps(reply[name], default=str)
            for name in SAID
            if str(reply.get(name) or "").strip()
        }
        for value in dict.fromkeys(said.values()):
            names = [name for name, other in said.items() if other == value]
            if drops(names):
                remedy = "move it into the content, or leave it out"
                expected = f"a reply whose {names[0]} the chat template writes: {remedy}"
                raise RecordError(field, expected, Found("one that it drops"))

    def apply(
        self,
        conversation: list[Message],
        field: str,
        variables: Fields,
        *,
        add_generation_prompt: bool,
    ) -> str:
        options = dict(variables)
        try:
            if self.tokenizer.chat_template is not None:
                template = self.tokenizer.get_chat_template(tools=variables.get("tools"))
                if (with_clock := self.clock.before(template)) != template:
                    options["chat_template"] = with_clock
            with time_limit(TIME_LIMIT):
                text = self.tokenizer.apply_chat_template(
                    conversation,
                    tokenize=False,
                    add_generation_prompt=add_generation_prompt,
                    **options,
                )
            return cast(str, text)
        except TookTooLongError as error:  # the next records would take as long, so none is skipped
            raise DataError(
                f"the chat template has not ended after {TIME_LIMIT:g} s, for field '{field}'"
            ) from error
        except Exception as error:
            # a template is a program of the model's author and may raise anything
            refusal = Found(f"its refusal: {error}")
            raise RecordError(field, "messages that the chat template accepts", refusal) from error


# --- ends of responses ----------------------------------------------------------------------------


class ResponseEnds(NamedTuple):
    """How responses end. ids: the tokens that end one wherever they stand, those of a model's
    settings first. text, chat: the one that closes a written response, to plain text and to
    messages, where the template writes none; None for a tokenizer without an end-of-sequence.
    """

    ids: tuple[int, ...]
    text: int | None
    chat: int | None


def response_ends(
    tokenizer: PreTrainedTokenizerBase, config: GenerationConfig | PretrainedConfig | None = None
) -> ResponseEnds:
    """The ends of a response: the tokens at which the model's settings stop, the tokenizer's
    end-of-sequence, and the token with which the chat template ends a reply. Data, samplers,
    servers, reward models and saved files all ask here: what one of them took for an end and
    another did not would be trained, but never sampled.

    config: a policy's generation_config, or the configuration of a reward model, which has none.
    Without it the tokenizer alone says. A token for padding that is also one of these is an end.
    """
    eos = getattr(config, "eos_token_id", None)
    of_model = eos if isinstance(eos, list | tuple) else [eos]
    closing = None if tokenizer.chat_template is None else ChatTemplate(tokenizer).closing()
    ids = (number for number in (*of_model, tokenizer.eos_token_id, closing) if number is not None)
    return ResponseEnds(
        ids=tuple(dict.fromkeys(ids)),
        text=tokenizer.eos_token_id,
        chat=tokenizer.eos_token_id if closing is None else closing,
    )


def json_value(record: Fields, field: str, kind: type, expected: str) -> Any:
    """A field that may hold JSON as text, as typed files do; empty if it is missing or null."""
    value = record.get(field)
    if isinstance(value, str):
        with suppress(ValueError):
            value = json.loads(value)
    if value is not None and not isinstance(value, kind):
        raise RecordError(field, expected, value)
    return kind() if value is None else value


# --- token ids of prompts and responses -----------------------------------------------------------


class Texts(NamedTuple):
    """A prompt and its responses. fields: the record's fields that the prompt and each response
    come from. templated: whether the chat template wrote them. changed: replies that it does not
    write as they are: it trims them, or moves their thinking. given: the fields that say the
    prompt: as the record has it, with `tools` and `chat_template_kwargs`.
    """

    prompt: str
    responses: tuple[str, ...]
    fields: tuple[str, ...]
    templated: bool
    given: dict[str, Any]
    changed: int = 0


class Encoded(NamedTuple):
    """The token ids of a prompt and its responses. prompt: its text after truncation.
    special_texts: how many of prompt and responses hold a special token's text.
    """

    prompt: str
    prompt_ids: list[int]
    response_ids: list[list[int]]
    prompt_truncated: bool
    responses_truncated: int
    special_texts: int


class Encoder:
    """Tokenizes for one model, within limits that count special tokens and the end-of-sequence
    token.

    A long prompt loses its beginning, but keeps the beginning-of-sequence tokens that the tokenizer
    or the chat template put first. A long response loses its end, and with it the end-of-sequence
    token: the model must not learn to stop there. The text of a special token is text, unless the
    chat template wrote it.

    tokenizer: the model's, with a chat template if the data are messages. ends: the model's, by
    default what the tokenizer alone says. The others are as in `Loader`. Raises ValueError if a
    limit leaves no room, responses need an end-of-sequence token that the tokenizer lacks, or the
    chat template does not name a variable.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        max_prompt_tokens: int,
        max_response_tokens: int | None,
        max_characters: int = LONGEST_TEXT,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        ends: ResponseEnds | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.tokenizer, self.continuation = tokenizer, Continuation(tokenizer)
        self.template = ChatTemplate(tokenizer, chat_template_kwargs, clock)
        self.special_ids = special_tokens(tokenizer).keys() - {tokenizer.unk_token_id}
        self.max_prompt_tokens, self.max_response_tokens = max_prompt_tokens, max_response_tokens
        self.max_characters = max_characters
        self.first_ids = ids_added_first(tokenizer)
        if max_prompt_tokens <= len(self.first_ids):
            raise UserError(
                f"max_prompt_tokens must be at least {len(self.first_ids) + 1}, got {max_prompt_tokens}"
            )
        if max_response_tokens is not None and tokenizer.eos_token_id is None:
            raise UserError(
                "the tokenizer has no end-of-sequence token, which must close each response"
            )
        self.ends = ends or response_ends(tokenizer)

    def render(
        self, prompt: Part, responses: tuple[Part, ...], record: Fields = NO_FIELDS
    ) -> Texts:
        """Applies the chat template to messages, with their record's fields for it; text stays.
        Raises RecordError.
        """
        fields = (prompt.field, *(response.field for response in responses))
        templated = not isinstance(prompt.value, str)
        variables = self.template.variables(record) if templated else {}
        before = self.template.prompt(prompt, variables) if templated else cast(str, prompt.value)
        replies = tuple(
            self.template.reply(prompt, before, response, variables)
            if templated
            else cast(str, response.value)
            for response in responses
        )
        given = {"prompt": prompt.value}
        if templated:
            given |= {
                name: record[name] for name in TEMPLATE_FIELDS if record.get(name) is not None
            }
        for field, text in zip(fields, (before, *replies), strict=True):
            if len(text) > self.max_characters:
                raise RecordError(
                    field,
                    f"at most {self.max_characters} characters",
                    Found(f"{len(text)} of them"),
                )
        contents = (
            [cast(Any, response.value)[-1]["content"] for response in responses]
            if templated
            else []
        )
        changed = sum(
            content not in reply for content, reply in zip(contents, replies, strict=False)
        )
        return Texts(before, replies, fields, templated, given, changed)

    def encode(self, batch: list[Texts]) -> list[Encoded | RecordError]:
        """One result for each entry of the batch, in order; a RecordError if its tokens cannot be
        used.
        """
        prompts = self.tokenize([(entry.templated, BEGINNING, entry.prompt) for entry in batch])
        keys = []
        for entry, prompt_ids in zip(batch, prompts, strict=True):
            # What responses continue: nothing, text, or a special token, behind which a text may
            # begin again.
            last = prompt_ids[-1] if prompt_ids else BEGINNING
            if last not in self.continuation.begins:
                last = INSIDE
            keys += [(entry.templated, last, text) for text in entry.responses]
        # The responses of all entries go to the tokenizer together.
        response_ids = iter(self.tokenize(keys))
        encoded = []
        for entry, prompt_ids in zip(batch, prompts, strict=True):
            responses = islice(response_ids, len(entry.responses))
            encoded.append(self.encode_one(entry, [prompt_ids, *responses]))
        return encoded

    def tokenize(self, keys: list[tuple[bool, int, str]]) -> list[list[int]]:
        """The ids of texts: whether the chat template wrote it, the token before it, and the text
        itself.
        """
        by_kind: dict[tuple[bool, int], dict[str, list[int]]] = {}
        for templated, last, text in keys:
            by_kind.setdefault((templated, last), {})[text] = []
        for (templated, last), of in by_kind.items():
            of |= zip(of, self.continuation.ids(list(of), last, control=templated), strict=True)
        return [by_kind[templated, last][text] for templated, last, text in keys]

    def encode_one(
        self, texts: Texts, prompt_and_response_ids: list[list[int]]
    ) -> Encoded | RecordError:
        prompt_ids, *response_ids = prompt_and_response_ids
        plain_text = not texts.prompt and not texts.templated and bool(response_ids)
        if plain_text:
            (ids,) = response_ids
            prompt_ids, response_ids = (
                (self.first_ids, [ids]) if self.first_ids else (ids[:1], [ids[1:]])
            )
        try:
            for field, ids in zip(texts.fields, prompt_and_response_ids, strict=True):
                if not texts.templated and not self.special_ids.isdisjoint(ids):
                    raise RecordError(
                        field, "text that encodes to ordinary tokens", Found("a special token")
                    )
            encoded = (
                ("", prompt_ids, False) if plain_text else self.encode_prompt(texts, prompt_ids)
            )
            written = zip(response_ids, texts.fields[1:], strict=True)
            whole = [self.closed(*response, templated=texts.templated) for response in written]
        except RecordError as problem:
            return problem
        kept = [response[: self.max_response_tokens] for response in whole]
        for later, response in enumerate(kept):
            if (earlier := kept.index(response)) < later:
                expected = f"another response than '{texts.fields[1 + earlier]}'"
                return RecordError(texts.fields[1 + later], expected, Found("the same"))
        plain = () if texts.templated else (texts.prompt, *texts.responses)
        special_texts = sum(self.template.special.search(text) is not None for text in plain)
        prompt, ids, prompt_truncated = encoded
        return Encoded(
            prompt, ids, kept, prompt_truncated, sum(map(operator.ne, whole, kept)), special_texts
        )

    def encode_prompt(self, texts: Texts, ids: list[int]) -> tuple[str, list[int], bool]:
        """The text as the model sees it, its ids, and whether the beginning was cut off."""
        if not ids:
            raise RecordError(texts.fields[0], "text that the tokenizer knows", Found("no token"))
        if texts.templated:
            first, rest = split_bos(ids, self.tokenizer.bos_token_id)
        else:
            first, rest = self.first_ids, ids
        room = self.max_prompt_tokens - len(first)
        if len(rest) <= room:
            return texts.prompt, first + rest, False
        kept = rest[len(rest) - room :]
        seen = first + kept if texts.templated else kept
        return (
            cast(str, self.tokenizer.decode(seen, clean_up_tokenization_spaces=False)),
            first + kept,
            True,
        )

    def closed(self, ids: list[int], field: str, *, templated: bool) -> list[int]:
        """The ids up to the first token at which a sampler stops, which is added if there is none.
        White space and special tokens that a template writes after it are cut off: no policy is
        asked for them.
        """
        place = next((place for place, token in enumerate(ids) if token in self.ends.ids), len(ids))
        content, after = ids[:place], ids[place + 1 :]
        if not content:
            raise RecordError(field, "text that the tokenizer knows", Found("no token"))
        if after and cast(str, self.tokenizer.decode(after, skip_special_tokens=True)).strip():
            raise RecordError(
                field,
                "no end-of-sequence token inside a response",
                Found("one, with text after it"),
            )
        closing = self.ends.chat if templated else self.ends.text
        return [*content, ids[place] if place < len(ids) else cast(int, closing)]


# --- tokens that a tokenizer adds by itself -------------------------------------------------------


def ids_added_first(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The special tokens that the tokenizer puts before a text; those after it (often eos) must not
    end a prompt.
    """
    # A letter, then the vocabulary, in case it lacks the letter.
    for probe in (
        "a",
        *(token for token in tokenizer.get_vocab() if token not in tokenizer.all_special_tokens),
    ):
        plain = tokenizer(probe, add_special_tokens=False).input_ids
        if plain:
            marked = tokenizer(probe).input_ids
            return next(
                marked[:i] for i in range(len(marked)) if marked[i : i + len(plain)] == plain
            )
    raise UserError("the tokenizer turns every text into nothing")


def split_bos(ids: list[int], bos: int | None) -> tuple[list[int], list[int]]:
    """The beginning-of-sequence token, or nothing if `ids` does not start with it; and the other
    ids.
    """
    return (ids[:1], ids[1:]) if bos is not None and ids[:1] == [bos] else ([], ids)
