"""Observations as token ids that continue a trajectory: what was sampled stays as it is, and is never written again."""

from collections.abc import Callable, Set

from transformers import PreTrainedTokenizerBase

from fastp3o.data.encoding import ChatTemplate
from fastp3o.data.tokens import INSIDE, Continuation
from fastp3o.errors import UserError
from fastp3o.packing.packed_row import Ids

# The ids of an observation, given its text and the last token of the turn or prompt before it.
Observe = Callable[[str, int], Ids]


def plain_observations(tokenizer: PreTrainedTokenizerBase) -> Observe:
    """The text alone. Names of special tokens in it are text."""
    continuation = Continuation(tokenizer)
    return lambda text, last: continuation.ids([text], last, control=False)[0]


def chat_observations(tokenizer: PreTrainedTokenizerBase, role: str, end_ids: Set[int]) -> Observe:
    """The text as a message of this role, between what the chat template writes after a reply and before the next one.

    The template is asked once, about messages that are marks. A turn ends with the token with which the template ends a
    reply; where the policy has stopped at another one, that token comes first in the observation. Raises UserError for
    a template that writes earlier messages otherwise once others follow them: what was sampled would not be what the
    template writes.
    """
    template, continuation, name = ChatTemplate(tokenizer), Continuation(tokenizer), tokenizer.name_or_path
    marks = [f"\ue000{number}\ue001" for number in range(4)]
    reply = f"<think>\n{marks[1]}\n</think>\n\n{marks[2]}"
    messages = [
        {"role": one, "content": content}
        for one, content in (("user", marks[0]), ("assistant", reply), (role, marks[3]))
    ]
    before = template.apply(messages[:1], role, {}, add_generation_prompt=True)
    written = template.apply(messages, role, {}, add_generation_prompt=True)
    if not written.startswith(before + reply) or marks[3] not in written:
        raise UserError(
            f"the chat template of {name} changes a reply once a message of role {role} follows it (it leaves out "
            f"thinking, or writes marks anew): trajectories, which only grow, cannot be written with it"
        )
    between, after = written[len(before + reply) :].split(marks[3])
    ids = continuation.ids([between], INSIDE, control=True)[0]
    first_end = next((place for place, token in enumerate(ids) if token in end_ids), None)
    if first_end is None:
        raise UserError(f"the chat template of {name} ends a reply with no token at which the policy stops")
    closing, opening = ids[: first_end + 1], ids[first_end + 1 :]

    def observe(text: str, last: int) -> Ids:
        content = continuation.ids([text], ids[-1], control=False)[0] if text else []
        ending = continuation.ids([after], INSIDE if text else ids[-1], control=True)[0]
        return [*([] if last == closing[-1] else closing), *opening, *content, *ending]

    return observe
