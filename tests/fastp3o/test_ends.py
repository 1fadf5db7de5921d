"""How a response ends has one answer in every family: data, samplers, reward models and saved files
stop there.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    LlamaForSequenceClassification,
    LogitsProcessorList,
)
from transformers import PreTrainedTokenizerBase as Tokenizer

from fastp3o import train
from fastp3o.data.encoding import ResponseEnds, response_ends
from fastp3o.data.loading import load_demonstrations, load_preferences, load_prompts, load_rankings
from fastp3o.data.tokens import Continuation, text_of_ids
from fastp3o.errors import UserError
from fastp3o.models.ends import checkpoint_ends, padding_token, write_ends
from fastp3o.models.loading import load_reward_model
from fastp3o.models.packed_model import PackedModel, scores
from fastp3o.models.tokenizer import load_tokenizer
from fastp3o.packing.pack import Packing, pack
from fastp3o.rewards.model import ModelReward
from fastp3o.rewards.reward import load_reward
from fastp3o.rollouts.groups import Ends, Group, make_prompts
from fastp3o.rollouts.turns.observation import chat_observations
from fastp3o.sources import InMemory
from fastp3o.training.config import RewardModelConfig, SFTConfig
from tests.fastp3o.families import FAMILIES, Family, every_chat_family, every_family, save_family

LENGTHS = {"max_prompt_tokens": 400, "max_response_tokens": 100}
LIMITS = {"max_prompt_tokens": 150, "max_response_tokens": 50}
ASKED = [{"role": "user", "content": "Name a tree."}]
TEXTS = ("Oak.", "A birch, 1+1=2")
PACKING = Packing(1000)


def reply(text: str) -> list[dict]:
    return [{"role": "assistant", "content": text}]


def records(family: Family) -> list[dict]:
    """Plain text, and messages where the family has a template."""
    text = {"prompt": "Name a tree:", "chosen": f" {TEXTS[0]}", "rejected": f" {TEXTS[1]}"}
    messages = {"prompt": ASKED, "chosen": reply(TEXTS[0]), "rejected": reply(TEXTS[1])}
    return [text, messages] if family.template else [text]


def family_named(name: str) -> Family:
    return next(family for family in FAMILIES if family.name == name)


def sampler_ends(folder: str, tokenizer: Tokenizer) -> Ends:
    return Ends(
        SimpleNamespace(generation_config=GenerationConfig.from_pretrained(folder)), tokenizer
    )


def assert_ends_once(ids: list[int], ends: Ends) -> None:
    assert [number in ends.ids for number in ids] == [False] * (len(ids) - 1) + [True]
    (response,) = ends.responses([ids])
    assert response.finished


CLOSED = {  # messages and text
    "qwen3": ("<|im_end|>", "<|im_end|>"),
    "qwen_base": ("<|im_end|>", "<|endoftext|>"),
    "qwen_tuned": ("<|im_end|>", "<|im_end|>"),
    "gemma3": ("<end_of_turn>", "<eos>"),
    "llama3_1": ("<|eot_id|>", "<|eot_id|>"),
    "llama3_base": ("<|end_of_text|>", "<|end_of_text|>"),
    "llama2": ("</s>", "</s>"),
    "phi3": ("<|end|>", "<|endoftext|>"),
    "gptoss": ("<|return|>", "<|return|>"),
}


@every_family
def test_what_closes_a_response_of_each_family(family: Family):
    tokenizer = family.tokenizer()
    ends = response_ends(tokenizer, GenerationConfig(eos_token_id=family.end_ids(tokenizer)))
    closing = tuple(tokenizer.convert_ids_to_tokens([ends.chat, ends.text]))
    assert closing == CLOSED[family.name.removesuffix("-published")]
    expected = {*family.end_ids(tokenizer), ends.chat, ends.text}
    assert {*ends.ids} == expected
    if "gptoss" in family.name:
        # of a message within a reply
        assert tokenizer.convert_tokens_to_ids("<|end|>") not in ends.ids


def test_a_template_that_ends_replies_with_text_or_refuses_two_messages_adds_no_end():
    tokenizer = family_named("gemma3").tokenizer()
    eos = tokenizer.eos_token_id
    for template in (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}",
        "{{ raise_exception('no') }}",
        "<start_of_turn>{{ messages[0].content }}<end_of_turn>",  # drops the reply
    ):
        tokenizer.chat_template = template
        assert response_ends(tokenizer) == ResponseEnds((eos,), eos, eos)
    # A token for padding, unknown characters and 0 may be ends, too.
    small = SimpleNamespace(eos_token_id=0, chat_template=None)
    assert response_ends(small, GenerationConfig(eos_token_id=[3, 0])) == ResponseEnds((3, 0), 0, 0)


@every_family
def test_data_end_where_a_sampler_stops(family: Family, tmp_path: Path):
    folder, tokenizer = save_family(family, tmp_path)
    ends, sampler = checkpoint_ends(folder, tokenizer), sampler_ends(folder, tokenizer)
    assert {*ends.ids} == sampler.ids
    for record, closing in zip(records(family), (ends.text, ends.chat), strict=False):
        (example,), _ = load_preferences(
            InMemory("<records>", [record]), tokenizer, ends=ends, **LENGTHS
        )
        for ids in (example["chosen_ids"], example["rejected_ids"]):
            assert_ends_once(ids, sampler)
            assert ids[-1] == closing
        assert text_of_ids(tokenizer, example["chosen_ids"]).rstrip().endswith(TEXTS[0])


@every_chat_family
def test_turns_in_the_middle_end_as_the_last_one(family: Family, tmp_path: Path):
    folder, tokenizer = save_family(family, tmp_path)
    messages = [*ASKED, *reply(TEXTS[0]), {"role": "user", "content": "Another?"}, *reply(TEXTS[1])]
    source, ends = (
        InMemory("<records>", [{"messages": messages}]),
        checkpoint_ends(folder, tokenizer),
    )
    examples, _ = load_demonstrations(source, tokenizer, all_turns=True, ends=ends, **LENGTHS)
    assert len(examples) == 2
    for example in examples:
        assert_ends_once(example["response_ids"], sampler_ends(folder, tokenizer))


@every_chat_family
def test_a_turn_that_stopped_at_another_end_is_closed_as_the_template_closes_it(
    family: Family, tmp_path: Path
):
    folder, tokenizer = save_family(family, tmp_path)
    ends, sampler = checkpoint_ends(folder, tokenizer), sampler_ends(folder, tokenizer)
    # They drop the thinking of earlier replies, write a space before each, or end the last one
    # alone with <|return|>.
    if family.name.removesuffix("-published") in ("qwen3", "llama2", "gptoss"):
        with pytest.raises(UserError, match="changes a reply once a message"):
            chat_observations(tokenizer, "user", sampler.ids)
        return
    observe = chat_observations(tokenizer, "user", sampler.ids)
    after = observe("Another?", ends.chat)
    for end in sampler.ids - {ends.chat}:
        closing = observe("Another?", end)[: -len(after)]
        assert closing[-1] == ends.chat
        assert text_of_ids(tokenizer, closing).strip() == ""


def test_text_behind_an_end_is_refused():
    family = family_named("phi3")
    tokenizer = family.tokenizer()
    tokenizer.chat_template = family.template.replace("<|end|>\n", "<|end|>\nBye.")
    with pytest.raises(
        ValueError, match="no end-of-sequence token inside a response, got one, with text after it"
    ):
        load_demonstrations(
            InMemory("<records>", [{"messages": [*ASKED, *reply("Hi")]}]), tokenizer, **LENGTHS
        )


def in_training(model: PackedModel, example: dict) -> float:
    with torch.no_grad():
        (row,) = pack([example["prompt_ids"]], [example["ranked_ids"]], PACKING)
        return scores(model, row)[0].item()


@every_family
def test_one_text_has_one_score_in_training_and_online_by_whichever_end_it_was_sampled(
    family: Family, tmp_path: Path
):
    folder, tokenizer = save_family(family, tmp_path)
    scorer, _ = save_family(family, tmp_path / "scorer", scores=True, seed=1)
    model, ends = load_reward_model(scorer), sampler_ends(folder, tokenizer)
    other = family.tokenizer()
    other.get_vocab = lambda: {}  # the texts are tokenized anew
    rewards = [
        ModelReward(model, one, tokenizer, device=torch.device("cpu"), packing=PACKING)
        for one in (tokenizer, other)
    ]
    for record in records(family):
        source = InMemory("<records>", [record])
        (example,), _ = load_rankings(
            source, tokenizer, ends=checkpoint_ends(folder, tokenizer), **LENGTHS
        )
        expected = in_training(model, example)
        ids = example["ranked_ids"][0][:-1]
        continuation, last = Continuation(other), example["prompt_ids"][-1]
        text = continuation.text(ids, last)
        # a space may go, or a channel's name
        same_tokens = continuation.ids([text], last, control=False) == [ids]
        stopped = Ends(
            SimpleNamespace(generation_config=GenerationConfig()), tokenizer, stops=[text]
        )
        for as_given in (False, True):
            (prompt,) = make_prompts(
                load_prompts(source, tokenizer, max_prompt_tokens=400, as_given=as_given)[0][:]
            )
            sampled = [[*ids, end] for end in sorted(ends.ids)]
            responses = [*ends.responses(sampled, prompts=[prompt] * len(sampled))]
            responses += stopped.responses([ids], prompts=[prompt])
            assert all(response.finished for response in responses)
            for reward in rewards[: 2 if same_tokens else 1]:
                (found,) = reward([Group(prompt, responses)])
                torch.testing.assert_close(
                    found, torch.full_like(found, expected), atol=2e-5, rtol=1e-5
                )


def test_a_response_that_is_cut_is_read_at_its_last_token(tmp_path: Path):
    family = family_named("gemma3")
    scorer, tokenizer = save_family(family, tmp_path, scores=True)
    model = load_reward_model(scorer)
    (prompt,) = make_prompts(
        load_prompts(InMemory("<p>", [{"prompt": ASKED}]), tokenizer, max_prompt_tokens=100)[0][:]
    )
    ids = tokenizer("Oa").input_ids
    cut = list(
        Ends(SimpleNamespace(generation_config=GenerationConfig()), tokenizer).responses([ids])
    )
    reward = ModelReward(model, tokenizer, tokenizer, device=torch.device("cpu"), packing=PACKING)
    (row,) = pack([prompt.ids], [[ids]], PACKING)
    with torch.no_grad():
        assert reward([Group(prompt, cut)])[0, 0].item() == pytest.approx(
            scores(model, row).item(), abs=1e-5
        )


def with_ends_written(folder: str, tokenizer: Tokenizer, to: Path) -> str:
    """As a run reads a reward model, and saves it."""
    model = load_reward_model(folder).model
    write_ends(model, tokenizer, checkpoint_ends(folder, tokenizer))
    model.save_pretrained(to)
    tokenizer.save_pretrained(to)
    return str(to)


@every_family
def test_a_saved_reward_model_gives_transformers_our_scores(family: Family, tmp_path: Path):
    folder, _ = save_family(family, tmp_path / "begun", scores=True)
    saved = with_ends_written(folder, load_tokenizer(folder), tmp_path / "saved")
    theirs, tokenizer = (
        AutoModelForSequenceClassification.from_pretrained(saved).eval(),
        AutoTokenizer.from_pretrained(saved),
    )
    ends = checkpoint_ends(saved, tokenizer)
    assert {*ends.ids} == {*checkpoint_ends(folder, tokenizer).ids}
    assert theirs.config.pad_token_id == tokenizer.pad_token_id
    assert theirs.config.pad_token_id not in ends.ids
    own = load_reward_model(saved)
    for record in records(family):
        ((example,), _) = load_rankings(
            InMemory("<records>", [record]), tokenizer, ends=ends, **LENGTHS
        )
        texts = [example["prompt_ids"] + ids for ids in example["ranked_ids"]]
        batch = tokenizer.pad({"input_ids": texts}, return_tensors="pt", padding_side="right")
        with torch.no_grad():
            (row,) = pack([example["prompt_ids"]], [example["ranked_ids"]], PACKING)
            ours = scores(own, row)
            alone = torch.cat([theirs(torch.tensor([ids])).logits[:, 0] for ids in texts])
            together = theirs(**batch).logits[:, 0]
        torch.testing.assert_close(alone, ours, atol=2e-5, rtol=1e-5)
        torch.testing.assert_close(together, ours, atol=2e-5, rtol=1e-5)


def scorer_of(tokenizer: Tokenizer, **settings: Any) -> LlamaForSequenceClassification:
    sizes = {
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
    }
    with torch.device("meta"):
        return LlamaForSequenceClassification(
            LlamaConfig(vocab_size=len(tokenizer), **sizes, **settings)
        )


@pytest.mark.parametrize(
    ("name", "pad", "expected"),
    [
        ("gemma3", "<pad>", "<pad>"),
        ("llama2", None, "<unk>"),
        ("qwen3", "<|endoftext|>", "<|im_start|>"),  # nothing else is left in so small a vocabulary
        ("phi3", "<|endoftext|>", "<unk>"),
        ("llama3_1", None, "<|end_header_id|>"),
        ("llama3_base", None, "<|end_header_id|>"),
    ],
)
def test_padding_is_the_tokenizers_own_or_a_token_that_no_text_has(
    name: str, pad: str | None, expected: str
):
    tokenizer = family_named(name).tokenizer()
    tokenizer.pad_token = pad
    ends = response_ends(
        tokenizer, GenerationConfig(eos_token_id=family_named(name).end_ids(tokenizer))
    )
    model = scorer_of(tokenizer, pad_token_id=None)
    assert tokenizer.convert_ids_to_tokens(padding_token(model, tokenizer, ends)) == expected


def test_padding_may_be_0_and_where_all_special_tokens_are_ends_closes_no_written_response():
    tokenizer = family_named("llama2").tokenizer()
    assert tokenizer.unk_token_id == 0
    model, ends = scorer_of(tokenizer, pad_token_id=0), response_ends(tokenizer)
    assert padding_token(model, tokenizer, ends) == 0
    write_ends(model, tokenizer, ends)
    assert (model.config.pad_token_id, tokenizer.pad_token_id) == (0, 0)

    tokenizer = family_named("llama3_base").tokenizer()
    every = tuple(tokenizer.convert_tokens_to_ids(token) for token in tokenizer.all_special_tokens)
    model, ends = scorer_of(tokenizer, pad_token_id=None), ResponseEnds(every, every[0], every[1])
    assert padding_token(model, tokenizer, ends) not in (None, *every[:2])


def test_one_token_for_everything_is_no_padding(tokenizer):
    ends = ResponseEnds(tuple(range(len(tokenizer))), 0, 0)
    alone = SimpleNamespace(
        all_special_ids=[0], all_special_tokens=["<end>"], added_tokens_decoder={}, chat_template=None,
        bos_token_id=0, eos_token_id=0, unk_token_id=0, pad_token_id=0,
    )  # fmt: skip
    model = scorer_of(tokenizer, pad_token_id=0, eos_token_id=0)
    write_ends(model, alone, ends._replace(ids=(0,)))
    assert (model.config.pad_token_id, model.config.eos_token_id) == (None, 0)


class Says:
    """A model whose next token is always the same."""

    def __init__(self, token: int):
        self.token = token

    def __call__(self, ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        return torch.full_like(logits, -1e9).index_fill_(1, torch.tensor([self.token]), 0.0)


@every_family
def test_a_saved_policy_stops_where_the_run_stopped(family: Family, tmp_path: Path):
    folder, tokenizer = save_family(family, tmp_path / "begun")
    ends = sampler_ends(folder, tokenizer).ids
    before = GenerationConfig.from_pretrained(folder).eos_token_id
    model = AutoModelForCausalLM.from_pretrained(folder)
    write_ends(model, tokenizer, checkpoint_ends(folder, tokenizer))
    model.save_pretrained(tmp_path / "saved")
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    after = saved.generation_config.eos_token_id
    assert {*(after if isinstance(after, list) else [after])} == ends
    if ends == {*before}:
        assert after == before  # as it was
    else:
        assert after[: len(before)] == before
    asked = torch.tensor([tokenizer("Hi").input_ids])
    for end in sorted(ends):
        options = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
        written = saved.generate(
            asked, logits_processor=LogitsProcessorList([Says(end)]), **options
        )
        assert written.shape[1] == asked.shape[1] + 1


@pytest.mark.parametrize("lora", [{}, {"lora_rank": 2, "lora_save": "adapter"}])
def test_what_a_run_saves_stops_where_its_data_end(lora, tmp_path: Path):
    folder, tokenizer = save_family(family_named("qwen_base"), tmp_path / "base")
    config = SFTConfig(
        model=folder,
        output_dir=str(tmp_path / "sft"),
        batch_size=1,
        epochs=1,
        report_to="none",
        **LIMITS,
        **lora,
    )
    result = train(config, train_data=[{"messages": [*ASKED, *reply("Oak.")]}])
    ends = tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_end|>"])
    assert result.model.generation_config.eos_token_id == ends


def test_a_trained_reward_model_is_read_by_transformers_as_by_us(tmp_path: Path):
    folder, _ = save_family(family_named("llama3_1"), tmp_path / "base")
    config = RewardModelConfig(
        model=folder,
        output_dir=str(tmp_path / "rm"),
        batch_size=1,
        epochs=5,
        learning_rate=0.1,
        **LIMITS,
    )
    data = [{"prompt": ASKED, "chosen": reply(TEXTS[0]), "rejected": reply(TEXTS[1])}]
    result = train(config, train_data=data)
    model, tokenizer = result.model.eval(), result.tokenizer
    (example,), _ = load_rankings(InMemory("<records>", data), tokenizer, **LENGTHS)
    texts = [example["prompt_ids"] + ids for ids in example["ranked_ids"]]
    (row,) = pack([example["prompt_ids"]], [example["ranked_ids"]], PACKING)
    with torch.no_grad():
        ours = scores(load_reward_model(str(tmp_path / "rm" / "model")), row)
        theirs = model(**tokenizer.pad({"input_ids": texts}, return_tensors="pt")).logits[:, 0]
    assert ours.std() > 0.1
    torch.testing.assert_close(theirs, ours, atol=1e-4, rtol=1e-4)


def test_the_model_of_a_reward_adapter_alone_pads_as_its_tokenizer(tmp_path: Path):
    folder, _ = save_family(family_named("llama3_1"), tmp_path / "base")
    adapter = {"lora_rank": 2, "lora_save": "adapter"}
    config = RewardModelConfig(
        model=folder, output_dir=str(tmp_path / "rm"), batch_size=1, epochs=1, **LIMITS, **adapter
    )
    data = [{"prompt": ASKED, "chosen": reply(TEXTS[0]), "rejected": reply(TEXTS[1])}]
    result = train(config, train_data=data)
    config = result.model.config
    assert config.pad_token_id == result.tokenizer.pad_token_id
    assert config.pad_token_id not in config.eos_token_id
    # Its head is the trained one, whatever transformers makes of it.
    head = load_file(tmp_path / "rm" / "adapter" / "adapter_model.safetensors")[
        "base_model.model.score.weight"
    ]
    assert head.any()
    torch.testing.assert_close(result.model.score.modules_to_save.default.weight, head)


def test_a_reward_model_that_pads_with_the_end_of_responses_is_named(tmp_path: Path, caplog):
    family = family_named("llama2")
    folder, tokenizer = save_family(
        family, tmp_path, scores=True, pad_token_id=family.tokenizer().eos_token_id
    )
    settings = {"device": torch.device("cpu"), "dtype": torch.float32, "packing": PACKING}
    with caplog.at_level("WARNING"):
        load_reward(folder, tokenizer, **settings)
    assert "pads with '</s>', which ends responses" in caplog.text
