"""Texts and messages as ids, with a tokenizer of one token a byte, so that expected ids can be read
off the text.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from fastp3o.data.encoding import Encoded, Encoder, Texts, ids_added_first
from fastp3o.data.errors import RecordError
from fastp3o.data.layouts import Part

BOS, EOS = "<s>", "</s>"
CHATML = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}" + EOS + "\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
USER, REPLY = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}


def byte_tokenizer(adds: str = "$A", template: str | None = None) -> PreTrainedTokenizerFast:
    """`adds` is what the tokenizer puts around a text, as "<s> $A </s>"."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({character: i for i, character in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([BOS, EOS])
    special = [(token, tokenizer.token_to_id(token)) for token in (BOS, EOS)]
    tokenizer.post_processor = processors.TemplateProcessing(single=adds, special_tokens=special)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=BOS, eos_token=EOS)
    fast.chat_template = template
    return fast


PLAIN = byte_tokenizer()
BOS_ID, EOS_ID = PLAIN.bos_token_id, PLAIN.eos_token_id


def token_ids(text: str, **options: bool) -> list[int]:
    return PLAIN(text, add_special_tokens=False, **options).input_ids


def texts(prompt: str, *responses: str) -> Texts:
    fields = ("prompt", "chosen", "rejected")[: 1 + len(responses)]
    return Texts(prompt, responses, fields, templated=False, given=prompt)


def encode(encoder: Encoder, item: Texts) -> Encoded:
    (result,) = encoder.encode([item])
    assert isinstance(result, Encoded), result
    return result


def test_bos_is_found_with_a_vocabulary_of_other_letters():
    tokenizer = Tokenizer(models.BPE({BOS: 0, "ö": 1}, []))
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, 0)]
    )
    assert ids_added_first(PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=BOS)) == [
        0
    ]


def test_truncation_and_padding_of_the_tokenizer_file_are_off_and_prompt_and_response_share_no_token():
    tokenizer = Tokenizer(models.BPE({"a": 0, "b": 1, "ab": 2, EOS: 3}, [("a", "b")]))
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=50)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=EOS, pad_token=EOS)
    encoded = encode(Encoder(fast, 100, 100), texts("aaaaa", "baaaa"))
    assert (encoded.prompt_ids, encoded.response_ids) == ([0] * 5, [[1, 0, 0, 0, 0, 3]])


@pytest.mark.parametrize("adds", ["$A", f"{BOS} $A", f"$A {EOS}", f"{BOS} $A {EOS}"])
@given(
    prompt=st.text(min_size=1),
    response=st.text(min_size=1),
    limits=st.tuples(*[st.integers(2, 12)] * 2),
)
def test_truncation_keeps_the_ends_that_matter(
    adds: str, prompt: str, response: str, limits: tuple[int, int]
):
    """A prompt begins with the tokenizer's `bos` and never ends with its `eos`."""
    tokenizer = byte_tokenizer(adds)
    first = [BOS_ID] if BOS in adds else []
    assert ids_added_first(tokenizer) == first
    whole, reply = token_ids(prompt), token_ids(response)
    encoded = encode(Encoder(tokenizer, *limits), texts(prompt, response))

    room = limits[0] - len(first)
    assert encoded.prompt_ids == first + whole[-room:]
    assert encoded.prompt_truncated == (len(whole) > room)
    assert encoded.prompt == (PLAIN.decode(whole[-room:]) if encoded.prompt_truncated else prompt)

    (response_ids,) = encoded.response_ids
    assert response_ids == [*reply, EOS_ID][: limits[1]]
    assert encoded.special_texts == 0
    assert (
        encoded.responses_truncated == (len(reply) + 1 > limits[1]) == (response_ids[-1] != EOS_ID)
    )


def test_the_text_of_a_special_token_is_text():
    encoder = Encoder(byte_tokenizer(f"{BOS} $A"), 100, 100)
    encoded = encode(encoder, texts(f"{BOS}Hi{EOS}", f"you{EOS}"))
    assert encoded.prompt_ids == [BOS_ID, *token_ids(f"{BOS}Hi{EOS}", split_special_tokens=True)]
    assert encoded.response_ids == [[*token_ids(f"you{EOS}", split_special_tokens=True), EOS_ID]]
    assert encoded.special_texts == 2


LETTER = Tokenizer(models.BPE({"a": 0, EOS: 1}, []))
WORDS = Tokenizer(models.WordLevel({"a": 0, EOS: 1}, unk_token="a"))
WORDS.pre_tokenizer = pre_tokenizers.WhitespaceSplit()


@pytest.mark.parametrize(
    ("tokenizer", "item", "said"),
    [
        (WORDS, texts("a", f"a {EOS}"), "'chosen': expected text that encodes to ordinary tokens"),
        (LETTER, texts("é", "a"), "'prompt': expected text that the tokenizer knows"),
        (LETTER, texts("a", "é"), "'chosen': expected text that the tokenizer knows"),
    ],
)
def test_text_that_the_tokenizer_has_no_text_tokens_for_is_refused(
    tokenizer: Tokenizer, item: Texts, said: str
):
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=EOS)
    (problem,) = Encoder(fast, 9, 9).encode([item])
    assert said in str(problem.at("file", 1))


def test_limits_and_tokenizers_that_cannot_work():
    with pytest.raises(ValueError, match="max_prompt_tokens must be at least 2, got 1"):
        Encoder(byte_tokenizer(f"{BOS} $A"), 1, 9)
    endless = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE({"a": 0}, [])))
    with pytest.raises(ValueError, match="no end-of-sequence token"):
        Encoder(endless, 9, 9)
    assert encode(Encoder(endless, 9, None), texts("a")).prompt_ids == [0]


def chat(
    template: str, *responses: dict, adds: str = "$A", longest: int = 100
) -> tuple[Encoded, Texts]:
    encoder = Encoder(byte_tokenizer(adds, template), longest, 100)
    rendered = encoder.render(
        Part("prompt", [USER]), tuple(Part("chosen", [response]) for response in responses)
    )
    return encode(encoder, rendered), rendered


def test_the_response_is_what_the_template_adds():
    encoded, rendered = chat(CHATML, REPLY)
    prompt = f"<|user|>Hi{EOS}\n<|assistant|>"
    assert (rendered.prompt, rendered.responses) == (prompt, (f"Hello{EOS}\n",))
    assert encoded.prompt_ids == token_ids(prompt)
    assert encoded.response_ids == [[*token_ids("Hello"), EOS_ID]], (
        "nothing is generated after the end of sequence"
    )
    # A template without end of sequence is closed by one.
    encoded, _ = chat("{% for m in messages %}[{{ m['content'] }}]{% endfor %}", REPLY)
    assert encoded.response_ids == [[*token_ids("[Hello]"), EOS_ID]]


def test_the_template_alone_decides_on_bos():
    assert BOS_ID not in chat(CHATML, adds=f"{BOS} $A")[0].prompt_ids
    encoded, rendered = chat(BOS + CHATML, adds=f"{BOS} $A")
    assert encoded.prompt_ids == token_ids(rendered.prompt)
    assert encoded.prompt_ids.count(BOS_ID) == 1
    # A truncated conversation keeps it.
    encoded, _ = chat(BOS + CHATML, longest=5)
    assert encoded.prompt_ids == [BOS_ID, *token_ids("<|assistant|>")[-4:]]
    assert (encoded.prompt, encoded.prompt_truncated) == (BOS + "nt|>", True)


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (
            "{{ messages | length }} of {{ messages[0].content }}{{ messages[-1].content }}",
            "the same with and without",
        ),
        ("{{ raise_exception('only from admins') }}", "only from admins"),
        (
            "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}",
            "'assistant' that it drops",
        ),
    ],
)
def test_a_template_that_makes_no_reply_says_why(template: str, said: str):
    with pytest.raises(RecordError, match=said):
        chat(template, REPLY)
