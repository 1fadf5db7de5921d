"""Observations as token ids that continue a trajectory: what was sampled stays as it is, and is
never written again.
"""

import json
from collections.abc import Mapping, Set
from functools import lru_cache
from typing import Any, Protocol

from transformers import PreTrainedTokenizerBase

from fastp3o.data.encoding import TEMPLATE_FIELDS, BetweenTurns, ChatTemplate
from fastp3o.data.errors import RecordError
from fastp3o.data.tokens import INSIDE, Continuation
from fastp3o.errors import UserError
from fastp3o.packing.packed_row import Ids
from fastp3o.runtime.clock import Clock

KEPT = 1024  # records' variables whose turns are kept
CHARACTERS_PER_TOKEN, SHORT = 16, 10_000
WIDE = 2**16


class Observe(Protocol):
    def __call__(self, text: str, last: int, given: str = "", *, room: int = WIDE) -> Ids:
        """The ids of an observation. last: the last token of the turn or prompt before it. given: a
        Prompt's. room: tokens; no more than `longest_text(room)` is read of the text. Halves of
        surrogate pairs become U+FFFD.
        """


def longest_text(room: int) -> int:
    """Characters of an observation that are read if there is room for this many tokens: 16 for
    each, and at least 10,000.
    """
    return max(SHORT, CHARACTERS_PER_TOKEN * room)


def readable(text: str, room: int) -> str:
    """The part of a text that is read. Surrogates, which a truncated JSON escape or a file that is
    not UTF-8 leaves in a text, are replaced: no tokenizer accepts them.
    """
    return text[: longest_text(room)].encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def plain_observations(tokenizer: PreTrainedTokenizerBase) -> Observe:
    """Observations are the text alone. Names of special tokens in it are plain text."""
    continuation = Continuation(tokenizer)

    def observe(text: str, last: int, given: str = "", *, room: int = WIDE) -> Ids:
        return continuation.ids([readable(text, room)], last, control=False)[0]

    return observe


def chat_observations(
    tokenizer: PreTrainedTokenizerBase,
    role: str,
    end_ids: Set[int],
    settings: Mapping[str, Any] | None = None,
    clock: Clock | None = None,
) -> Observe:
    """The text as a message of this role, between what the chat template writes after a reply and
    before the next one, with the variables of the prompt's record. settings, clock: as a
    ChatTemplate's.

    A turn ends with the token with which the template ends a reply; where the policy has stopped at
    another one, that token comes first in the observation. Raises UserError for a template that
    writes earlier messages otherwise once others follow them: what was sampled would not be what
    the template writes.
    """
    if tokenizer.chat_template is None:
        raise UserError(
            f"observations of role {role} are messages, and the tokenizer has no chat template: --chat_template names "
            "one, or --observation_role text writes them as text"
        )
    template, name = ChatTemplate(tokenizer, settings, clock), tokenizer.name_or_path
    continuation = Continuation(tokenizer)

    @lru_cache(KEPT)
    def parts(fields: str) -> tuple[BetweenTurns, Ids, Ids]:
        """And the ids of what ends a reply, and of what comes before the text. fields: of a record,
        as JSON.
        """
        try:
            turns = template.between_turns(role, template.variables(json.loads(fields)))
        except RecordError as error:
            raise UserError(
                f"the chat template of {name} changes a reply once a message of role {role} follows it (it leaves out "
                f"thinking, or rewrites marks), or refuses that: expected {error.expected}, got {error.got}. "
                f"Trajectories only grow, and cannot be written with it: --chat_template names one that keeps replies"
            ) from error
        ids = continuation.ids([turns.between], INSIDE, control=True)[0]
        first_end = next((place for place, token in enumerate(ids) if token in end_ids), None)
        if first_end is None:
            raise UserError(
                f"the chat template of {name} ends a reply with no token at which the policy stops"
            )
        return turns, ids[: first_end + 1], ids[first_end + 1 :]

    def observe(text: str, last: int, given: str = "", *, room: int = WIDE) -> Ids:
        record = json.loads(given) if given else {}
        fields = {field: record[field] for field in TEMPLATE_FIELDS if field in record}
        turns, closing, opening = parts(json.dumps(fields))
        # A turn that stopped at another token than the template's gets the template's end first.
        end = [] if last == closing[-1] else closing
        before, content = [*closing, *opening][-1], Ids()
        written = template.content_between(turns, readable(text, room)) if text else ""
        if written:
            (content,) = continuation.ids([written], before, control=False)
            before = INSIDE
        (after,) = continuation.ids([turns.after], before, control=True)
        return [*end, *opening, *content, *after]

    parts("{}")  # what is wrong without a record's variables is said at once
    return observe
