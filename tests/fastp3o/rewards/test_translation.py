"""A reward model scores the tokens that it was trained on, whatever tokens the policy has."""

import pytest
from transformers import PreTrainedTokenizerFast

from fastp3o.data.encoding import Encoder
from fastp3o.data.layouts import Part
from fastp3o.rewards.model import Translation
from fastp3o.rollouts.groups import Group, Prompt, Response
from tests.fastp3o.data.test_encoding import BOS, EOS, byte_tokenizer

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
HOSTILE = f"Say {EOS}, {BOS} or <turn>:"


def tokenizer(
    adds=f"{BOS} $A", own: str | None = None, template: str | None = TEMPLATE
) -> PreTrainedTokenizerFast:
    """own: a special token that others do not have."""
    made = byte_tokenizer(adds, template)
    if own is not None:
        made.add_special_tokens({"additional_special_tokens": [own]})
    return made


def loaded(
    tokenizer: PreTrainedTokenizerFast, prompt: str | list[dict], response: str, longest: int = 999
):
    """(text, ids, response's ids) of a record, as a stage loads it."""
    encoder = Encoder(tokenizer, longest, 999)
    reply = response if isinstance(prompt, str) else [{"role": "assistant", "content": response}]
    (encoded,) = encoder.encode(
        [encoder.render(Part("prompt", prompt), (Part("response", reply),))]
    )
    return encoded.prompt, encoded.prompt_ids, encoded.response_ids[0]


def translated(
    policy: PreTrainedTokenizerFast,
    own: PreTrainedTokenizerFast,
    prompt,
    response: str,
    longest: int = 99,
):
    text, ids, response_ids = loaded(policy, prompt, response, longest)
    prompt_ids, found = Translation(policy, own)(
        [Group(Prompt(text, ids), [Response(response_ids, response, True)])]
    )
    return prompt_ids[0], found[0][0]


@pytest.mark.parametrize("adds", ["$A", f"{BOS} $A", f"$A {EOS}", f"{BOS} $A {EOS}"])
@pytest.mark.parametrize("prompt", ["Hi", HOSTILE, [{"role": "user", "content": "Hi"}]])
def test_prompts_and_responses_have_the_ids_that_the_loader_makes(adds, prompt):
    """Names of special tokens in a response are text."""
    own, said = (
        tokenizer(adds, own="<turn>"),
        f" Ho {BOS}<turn>" if isinstance(prompt, str) else " Ho",
    )
    for policy in (tokenizer(), tokenizer("$A", own="<sep>")):
        assert policy.get_vocab() != own.get_vocab()
        assert translated(policy, own, prompt, said) == loaded(own, prompt, said)[1:]


@pytest.mark.parametrize(("content", "longest"), [("Say <turn>:", 999), ("Say what you like", 24)])
def test_a_message_is_the_text_that_truncation_left_and_names_of_special_tokens_in_it_are_text(
    content, longest
):
    policy, other = tokenizer(), tokenizer(own="<turn>")
    asked = [{"role": "user", "content": content}]
    text, _, _ = loaded(policy, asked, " Ho", longest)
    ids = translated(policy, other, asked, " Ho", longest)[0]
    assert ids[0] == other.bos_token_id
    assert other.decode(ids) == text
    assert other.convert_tokens_to_ids("<turn>") not in ids
    # the template's
    assert [ids.count(token) for token in (other.bos_token_id, other.eos_token_id)] == [
        1,
        1,
    ]


def test_an_end_that_the_policy_did_not_write_is_not_added():
    own = tokenizer(own="<turn>")
    cut = [Group(Prompt("Hi", [1]), [Response([1], "Ho", False), Response([2], "", False)])]
    expected = [own("Ho", add_special_tokens=False).input_ids, [own.eos_token_id]]
    assert Translation(tokenizer(), own)(cut)[1] == [expected]
