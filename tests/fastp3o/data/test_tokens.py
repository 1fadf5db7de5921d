"""What continues a text is its tokens and no more, and the text of what was sampled is what was
sampled: for tokenizers with and without a dummy prefix, and any text.
"""

from unicodedata import is_normalized

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from fastp3o.data.loading import load_demonstrations
from fastp3o.data.tokens import BEGINNING, INSIDE, Continuation, text_of_ids, tokenize
from fastp3o.errors import UserError
from fastp3o.models.reference import InContext
from fastp3o.packing.pack import Packing
from fastp3o.rewards.model import Translation
from fastp3o.rollouts.groups import Group, Prompt, Response
from fastp3o.rollouts.prefix import Prefix
from fastp3o.rollouts.turns.observation import chat_observations, plain_observations
from fastp3o.sources import InMemory
from tests.fastp3o.data.test_encoding import byte_tokenizer
from tests.fastp3o.families import FAMILIES, Family, every_chat_family, every_family

LIMITS = {"max_prompt_tokens": 900, "max_response_tokens": 900}
# Some tokenizers compose letters, and all of SentencePiece read its own sign for a space as one.
anything = st.text(min_size=1, max_size=12).filter(
    lambda text: "▁" not in text and is_normalized("NFC", text)
)
pieces = st.sampled_from(
    [
        "2",
        "oak",
        " oak",
        "  x",
        "\n",
        "\n\n",
        "\t",
        "    return 1\n",
        "é",
        "🎈👩‍👩‍👧",
        "def f():\n",
        "'s",
    ]
)
texts = (anything | st.lists(pieces, min_size=1, max_size=4).map("".join)).filter(
    lambda text: any(character.isalnum() for character in text)
)


def sentence_piece(scheme: str, *, strips: bool = True) -> PreTrainedTokenizerBase:
    """With words of several letters, behind a space and without. scheme: "normalizer", as Llama 2
    has it before its tokenizer is loaded as one of transformers' own, or when Metaspace puts the
    prefix.
    """
    letters = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *map(chr, range(33, 127))]
    merges = [("o", "a"), ("oa", "k"), ("▁", "oak"), ("▁", "▁"), ("1", "+")]
    vocabulary = {token: number for number, token in enumerate([*letters, *map("".join, merges)])}
    own = Tokenizer(
        models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    if scheme == "normalizer":
        own.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
    else:
        own.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    own.decoder = decoders.Sequence([*parts, *([decoders.Strip(" ", 1, 0)] if strips else [])])
    return PreTrainedTokenizerFast(
        tokenizer_object=own, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )


def without_bytes() -> PreTrainedTokenizerBase:
    """Of letters alone: all others are one unknown token."""
    own = Tokenizer(
        models.BPE({"<unk>": 0, "▁": 1, "a": 2, "b": 3, "▁a": 4, "ab": 5}, [("▁", "a"), ("a", "b")])
    )
    own.model.unk_token, own.model.fuse_unk = "<unk>", True
    own.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
    own.decoder = decoders.Metaspace(prepend_scheme="always", split=False)
    return PreTrainedTokenizerFast(tokenizer_object=own, unk_token="<unk>", eos_token="</s>")


def bytes_behind_a_space() -> PreTrainedTokenizerBase:
    tokenizer = byte_tokenizer()
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    return tokenizer


PREFIXED = {
    "normalizer": sentence_piece("normalizer"),
    "always": sentence_piece("always"),
    "first": sentence_piece("first"),
    "bytes": bytes_behind_a_space(),
}
TOKENIZERS = PREFIXED | {
    "never": sentence_piece("never", strips=False),
    "never, but strips": sentence_piece("never"),
    **{str(family): family.tokenizer() for family in FAMILIES},
}
every_tokenizer = pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS)


def demonstration(tokenizer: PreTrainedTokenizerBase, record: dict) -> tuple[list[int], list[int]]:
    data, _ = load_demonstrations(InMemory("<test>", [record]), tokenizer, **LIMITS)
    return data[0]["prompt_ids"], data[0]["response_ids"][:-1]


@every_tokenizer
@settings(max_examples=20)
@given(prompt=texts, response=texts)
def test_a_prompt_and_its_response_are_the_text_of_the_record(tokenizer, prompt, response):
    prompt_ids, response_ids = demonstration(tokenizer, {"prompt": prompt, "completion": response})
    begun = text_of_ids(tokenizer, prompt_ids)
    assert begun.lstrip() == prompt.lstrip()
    assert text_of_ids(tokenizer, prompt_ids + response_ids) == begun + response
    continuation = Continuation(tokenizer)
    assert continuation.text(response_ids, prompt_ids[-1]) == response
    assert plain_observations(tokenizer)(response, prompt_ids[-1]) == response_ids


@every_tokenizer
@settings(max_examples=20)
@given(data=st.data())
def test_the_text_of_sampled_tokens_is_what_they_add_to_their_prompt(tokenizer, data):
    ids = data.draw(st.lists(st.integers(0, len(tokenizer) - 1), min_size=1, max_size=8))
    (prompt,) = tokenize(tokenizer, ["Say a:"], control=False)
    expected = text_of_ids(tokenizer, prompt + ids)
    assert (
        text_of_ids(tokenizer, prompt) + Continuation(tokenizer).text(ids, prompt[-1]) == expected
    )


@pytest.mark.parametrize("tokenizer", PREFIXED.values(), ids=PREFIXED)
def test_a_prefix_is_found_and_is_put_where_a_text_begins(tokenizer):
    continuation = Continuation(tokenizer)
    (begun,), (continued,) = (
        continuation.ids(["oak"], last, control=False) for last in (BEGINNING, INSIDE)
    )
    assert begun == tokenize(tokenizer, ["oak"], control=False)[0] != continued
    assert tokenize(tokenizer, ["1oak"], control=False)[0][-len(continued) :] == continued
    assert continuation.moved(begun) == continued
    assert continuation.moved([tokenizer.eos_token_id, *continued]) == [
        tokenizer.eos_token_id,
        *continued,
    ]
    # A text behind a special token begins where the tokenizer sees it so.
    name, end = tokenizer.eos_token, tokenizer.eos_token_id
    (whole,) = tokenize(tokenizer, [name + "oak"], control=True)
    assert [end, *continuation.ids(["oak"], end, control=False)[0]] == whole


@given(text=st.text("ab é", max_size=6))
def test_letters_that_a_vocabulary_lacks_are_not_lost_behind_a_text(text):
    tokenizer = without_bytes()
    (continued,) = Continuation(tokenizer).ids([text], INSIDE, control=False)
    (whole,) = tokenize(tokenizer, ["b" + text], control=False)
    begun = tokenize(tokenizer, ["b"], control=False)[0]
    assert [*begun, *continued] == whole
    assert Continuation(tokenizer).text(continued, INSIDE) == text_of_ids(tokenizer, whole)[1:]


@every_family
def test_tokenizers_without_a_prefix_are_as_they_are(family: Family):
    tokenizer = family.tokenizer()
    continuation = Continuation(tokenizer)
    assert bool(continuation.anchors) == bool(continuation.letter) == family.dummy_prefix
    if not family.dummy_prefix:
        assert continuation.ids([" a", "b"], INSIDE, control=True) == tokenize(
            tokenizer, [" a", "b"], control=True
        )


@every_chat_family
@settings(max_examples=20)
@given(question=texts, answer=texts)
def test_messages_are_tokens_of_the_whole_conversation(family: Family, question: str, answer: str):
    tokenizer = family.tokenizer()
    contents = [text.strip() for text in (question, answer)]
    assume(not any(name in text for text in contents for name in tokenizer.all_special_tokens))
    roles = ("user", "assistant")
    messages = [{"role": role, "content": text} for role, text in zip(roles, contents, strict=True)]
    prompt_ids, response_ids = demonstration(tokenizer, {"messages": messages})
    whole = tokenizer.apply_chat_template(messages, tokenize=False)
    (ids,) = tokenize(tokenizer, [whole], control=True)
    both = prompt_ids + response_ids
    assert ids[: len(both)] == both
    assert contents[1] in Continuation(tokenizer).text(response_ids, prompt_ids[-1])


@every_chat_family
def test_turns_with_observations_are_tokens_of_the_whole_conversation(family: Family):
    tokenizer = family.tokenizer()
    try:
        observe = chat_observations(tokenizer, "user", set(family.end_ids(tokenizer)))
    except UserError:
        pytest.skip("its template changes replies")
    contents = [("user", "Ask."), ("assistant", "Tell 2"), ("user", "Ask  again\n - 1")]
    messages = [{"role": role, "content": text} for role, text in contents]
    prompt_ids, response_ids = demonstration(tokenizer, {"messages": messages[:2]})
    ends = [place for place, token in enumerate(response_ids) if token in family.end_ids(tokenizer)]
    sampled = response_ids[: min(ends, default=None)]
    observed = observe(messages[2]["content"], sampled[-1])
    whole = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert prompt_ids + sampled + observed == tokenize(tokenizer, [whole], control=True)[0]


@pytest.mark.parametrize("name", ["normalizer", "always", "first"])
def test_what_is_put_before_prompts_is_one_text_with_them(name: str, tmp_path):
    """A --prefix, and a teacher's context."""
    tokenizer = PREFIXED[name]
    (tmp_path / "examples.txt").write_text("Q: 1\nA:")
    given, whole = (
        tokenize(tokenizer, [text], control=False)[0] for text in ("oak", "Q: 1\nA:oak")
    )
    prefix = Prefix(tokenizer, str(tmp_path / "examples.txt"))
    assert prefix.before(Prompt("oak", given)).ids == whole
    bos = tokenizer.bos_token_id
    assert prefix.before(Prompt("oak", [bos, *given])).ids == [bos, *whole]
    assert Prefix(tokenizer, None).before(Prompt("oak", given)).ids == given
    context = InContext(None, prefix.ids, bos, Packing(99), Continuation(tokenizer).moved)
    assert [*context.context, *context.moved(given)] == whole


@pytest.mark.parametrize("tokenizer", PREFIXED.values(), ids=PREFIXED)
@settings(max_examples=20)
@given(response=texts)
def test_a_reward_model_reads_a_response_behind_its_prompt(tokenizer, response):
    policy = byte_tokenizer()
    prompt = Prompt("Say a:", policy("Say a:").input_ids)
    (prompt_ids,), ((ids,),) = Translation(policy, tokenizer)(
        [Group(prompt, [Response([1], response, False)])]
    )
    assert (prompt_ids[-len(ids) :], ids) != (ids, [])
    assert text_of_ids(tokenizer, prompt_ids + ids) == text_of_ids(tokenizer, prompt_ids) + response


def test_no_space_is_cleaned_up():
    own = Tokenizer(models.WordLevel({"x": 0, "=": 1, ",": 2, "1": 3, "</s>": 4}, unk_token="x"))
    own.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=own, eos_token="</s>", clean_up_tokenization_spaces=True
    )
    assert Continuation(tokenizer).text([0, 1, 3, 2, 3], INSIDE) == "x = 1 , 1"
