"""A reward model of another family scores messages as its own chat template writes them, as in its
training data.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerBase

from fastp3o.data.loading import load_demonstrations, load_prompts
from fastp3o.models.loading import load_reward_model
from fastp3o.models.tokenizer import load_tokenizer
from fastp3o.packing.pack import Packing
from fastp3o.rewards.config import RemoteConfig
from fastp3o.rewards.model import ModelReward, Translation
from fastp3o.rewards.reward import asked_of_records
from fastp3o.rollouts.groups import Group, Prompt, Response, make_prompts
from fastp3o.runtime.clock import Clock
from tests.fastp3o.data.test_clock import EVENING
from tests.fastp3o.data.test_loading import jsonl
from tests.fastp3o.families import WITH_TEMPLATE, Family, every_chat_family, save_family
from tests.fastp3o.rewards.test_translation import tokenizer as text_tokenizer

BY_NAME = {family.name: family for family in WITH_TEMPLATE}
QWEN = BY_NAME["qwen3"]
CLOCK = Clock(EVENING)
USER = {"role": "user", "content": "Name a tree."}
TALK = [
    USER,
    {"role": "assistant", "content": "Oak."},
    {"role": "user", "content": "Another\none?"},
]
RECORDS: list[dict] = [
    {"prompt": [USER]},
    {"prompt": TALK},
    {"prompt": [{"role": "system", "content": "Be kind."}, *TALK]},
    {"prompt": [USER], "chat_template_kwargs": {"enable_thinking": False}},
    {
        "prompt": [USER],
        "tools": [{"type": "function", "function": {"name": "plant", "parameters": {}}}],
    },
]
SAID = ["An elm.", " A fir.\n", "<think>\nHm.\n</think>\n\nA yew."]


def asked_of(
    policy: PreTrainedTokenizerBase, folder: Path, records: list[dict], **options: Any
) -> list[Prompt]:
    """The prompts as a run has them that asks a reward model."""
    asked = asked_of_records(["runs/rm/model"], RemoteConfig())
    limits = {"max_prompt_tokens": 400, "clock": CLOCK}
    examples, _ = load_prompts(
        jsonl(folder, records, "asked.jsonl"), policy, **limits, **asked, **options
    )
    return make_prompts(examples[:])


def loaded(
    scorer: PreTrainedTokenizerBase, folder: Path, record: dict, said: str
) -> tuple[list[int], list[int]] | None:
    """As a stage loads the record with this response; None if the template refuses it."""
    source = jsonl(
        folder,
        [record | {"completion": [{"role": "assistant", "content": said}]}, GOOD],
        "loaded.jsonl",
    )
    options = {
        "max_prompt_tokens": 400,
        "max_response_tokens": 400,
        "skip_bad_records": True,
        "clock": CLOCK,
    }
    examples, _ = load_demonstrations(source, scorer, **options)
    return (examples[0]["prompt_ids"], examples[0]["response_ids"]) if len(examples) == 2 else None


GOOD = {"prompt": [USER], "completion": [{"role": "assistant", "content": "A good one."}]}


def read_by(scorer: PreTrainedTokenizerBase, record: dict) -> dict:
    """The record without what a template does not read."""
    fields = Translation(text_tokenizer(), scorer).encoder.template.fields_read(record)
    return {"prompt": record["prompt"]} | {name: value for name, value in fields.items() if value}


@every_chat_family
def test_messages_have_the_ids_that_the_loader_makes(tmp_path: Path, family: Family):
    scorer, policy = (
        family.tokenizer(),
        (BY_NAME["gemma3"] if "qwen" in family.name else QWEN).tokenizer(),
    )
    translate, compared = Translation(policy, scorer, max_prompt_tokens=400, clock=CLOCK), 0
    records = RECORDS if policy.get_vocab() == QWEN.tokenizer().get_vocab() else RECORDS[:3]
    for record in records:
        (prompt,) = asked_of(policy, tmp_path, [record])
        expected = [loaded(scorer, tmp_path, read_by(scorer, record), said) for said in SAID]
        if None in expected:
            continue
        end = [policy.eos_token_id]
        (ids,), (responses,) = translate(
            [Group(prompt, [Response(end, said, True) for said in SAID])]
        )
        assert [(ids, response) for response in responses] == expected
        # What was cut has no end.
        _, (cut,) = translate([Group(prompt, [Response([1], said, False) for said in SAID])])
        assert cut == [response[:-1] for _, response in expected]
        compared += 1
    assert compared >= 2 or family.name in (
        "llama2",
        "llama2-published",
        "gptoss",
        "gptoss-published",
    )


@pytest.mark.parametrize("scorer", ["gemma3", "phi3"])
def test_the_score_is_that_of_the_loaders_record(tmp_path: Path, scorer: str):
    policy = QWEN.tokenizer()
    folder, _ = save_family(BY_NAME[scorer], tmp_path / "model", scores=True)
    model = load_reward_model(folder, device=torch.device("cpu"), dtype=torch.float32)
    own = load_tokenizer(folder)
    settings = {"device": torch.device("cpu"), "packing": Packing(512), "reading": {"clock": CLOCK}}
    reward = ModelReward(model, own, policy, **settings)
    same = ModelReward(model, own, own, **settings)
    (prompt,) = asked_of(policy, tmp_path, [RECORDS[1]])
    groups, as_loaded = [Group(prompt, [Response([1], said, True) for said in SAID])], []
    for said in SAID:
        ids, response = loaded(own, tmp_path, RECORDS[1], said) or ([], [])
        as_loaded.append(same([Group(Prompt("", ids), [Response(response, "", True)])]).item())
    assert reward(groups)[0].tolist() == pytest.approx(as_loaded, abs=1e-5)


def test_messages_that_its_template_refuses_are_scored_as_text_and_that_is_said_once(
    tmp_path: Path, caplog, monkeypatch
):
    monkeypatch.setattr("fastp3o.rewards.model.logger.warning", lambda text: said.append(text))
    said: list[str] = []
    policy, scorer = QWEN.tokenizer(), BY_NAME["gemma3"].tokenizer()
    refused = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
    special = [{"role": "user", "content": "What is <end_of_turn>?"}]
    prompts = asked_of(policy, tmp_path, [{"prompt": one} for one in (refused, special, [USER])])
    translate = Translation(policy, scorer)
    groups = [Group(prompt, [Response([1], "Ho", True)]) for prompt in prompts]
    ids, responses = translate(groups)
    without = [group._replace(prompt=group.prompt._replace(given="")) for group in groups]
    as_text, texts = translate(without)
    assert (ids[:2], responses[:2]) == (as_text[:2], texts[:2])
    assert (ids[2], responses[2]) != (as_text[2], texts[2])
    assert len(said) == 1
    assert "Roles must alternate" in said[0]


@every_chat_family
def test_whatever_a_policy_writes_is_text_in_its_message(tmp_path: Path, family: Family):
    """Names of the reward model's special tokens, nothing, and half of a thought."""
    scorer, policy = family.tokenizer(), text_tokenizer()
    policy.chat_template = QWEN.template
    names = [token for token in scorer.all_special_tokens if token != scorer.unk_token]
    hostile = [
        f"a{names[0]}b {names[-1]}",
        names[0],
        "",
        "  \n",
        "</think>",
        "\ue002",
        "<think>\nx",
        "é\x00",
    ]
    (prompt,) = asked_of(policy, tmp_path, [{"prompt": [USER]}])
    translate = Translation(policy, scorer, clock=CLOCK)
    _, ((plain,),) = translate([Group(prompt, [Response([1], "ab ", True)])])
    (ids,), (responses,) = translate(
        [Group(prompt, [Response([1], said, True) for said in hostile[:4]])]
    )
    control = set(scorer.all_special_ids) - {scorer.unk_token_id}
    specials = [number for number in plain if number in control]
    for said, response in zip(hostile, responses, strict=False):
        assert response[-1] == plain[-1]
        if said.strip():
            assert [number for number in response if number in control] == specials
    assert ids
    for said in hostile:
        for finished in (True, False):
            _, ((response,),) = translate([Group(prompt, [Response([1], said, finished)])])
            assert response


def test_text_goes_as_it_is_and_a_template_of_the_same_vocabulary_is_named(tmp_path: Path):
    policy, scorer = QWEN.tokenizer(), BY_NAME["gemma3"].tokenizer()
    (prompt,) = asked_of(policy, tmp_path, [{"prompt": "Name a tree:"}])
    assert json.loads(prompt.given) == {"prompt": "Name a tree:"}
    (ids,), ((response,),) = Translation(policy, scorer)(
        [Group(prompt, [Response([1], " oak", True)])]
    )
    assert scorer.decode(ids + response[:-1]) == "Name a tree: oak"
    for template, differs in (
        (QWEN.template, False),
        (BY_NAME["qwen_base"].template, True),
        (None, False),
    ):
        other = QWEN.tokenizer()
        other.chat_template = template
        folder, _ = save_family(QWEN, tmp_path / "model", scores=True)
        model = load_reward_model(folder, device=torch.device("cpu"), dtype=torch.float32)
        reward = ModelReward(model, other, policy, device=torch.device("cpu"), packing=Packing(512))
        assert reward.shares_vocabulary
        assert reward.has_other_template == differs
