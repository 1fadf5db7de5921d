"""What is kept of samples is read as the tokens that were sampled, or is left out and counted, in
every family.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

from fastp3o.data.encoding import Encoder
from fastp3o.data.layouts import in_prompt_form
from fastp3o.data.loading import load_demonstrations, load_preferences, load_prompts
from fastp3o.data.tokens import Continuation, special_tokens
from fastp3o.generate.config import GenerateConfig
from fastp3o.generate.loop import generate
from fastp3o.generate.read_back import reads_back
from fastp3o.rollouts.groups import Response
from fastp3o.sources import InMemory
from tests.fastp3o.data.test_tokens import texts
from tests.fastp3o.families import FAMILIES, Family, every_chat_family, every_family, save_family
from tests.fastp3o.generate.test_generate import records

LIMITS = {"max_prompt_tokens": 400, "max_response_tokens": 400}
BY_NAME = {family.name: family for family in FAMILIES}
CHAT = [{"role": "user", "content": "Say a tree."}]


def last_of(prompt: Any, tokenizer: PreTrainedTokenizerBase) -> int:
    data, _ = load_prompts(
        InMemory("<prompts>", [{"prompt": prompt}]), tokenizer, max_prompt_tokens=400
    )
    return data[0]["prompt_ids"][-1]


def learnt(prompt: Any, text: str, tokenizer: PreTrainedTokenizerBase) -> list[int] | None:
    """The tokens that a stage learns of the record; None if it takes none."""
    record = {"prompt": prompt, "completion": in_prompt_form(prompt, text)}
    try:
        data, _ = load_demonstrations(InMemory("<kept>", [record]), tokenizer, **LIMITS)
    except ValueError:
        return None
    return data[0]["response_ids"]


def assert_told_apart(
    tokenizer: PreTrainedTokenizerBase, prompt: Any, sampled: list[list[int]]
) -> list[bool]:
    last, continuation = last_of(prompt, tokenizer), Continuation(tokenizer)
    responses = [Response(ids, continuation.text(ids, last), False) for ids in sampled]
    told = reads_back(Encoder(tokenizer, 400, None))({"prompt": prompt}, responses)
    for back, response in zip(told, responses, strict=True):
        ids = learnt(prompt, response.text, tokenizer)
        same = ids is not None and ids[: len(response.ids)] == response.ids
        after = tokenizer.decode(ids[len(response.ids) :], skip_special_tokens=True) if same else ""
        assert back == (same and not after.strip()), (response, ids)
    return told


@every_family
@pytest.mark.parametrize("form", ["text", "messages"])
@settings(max_examples=15)
@given(data=st.data())
def test_every_response_is_told_apart(family: Family, form: str, data: st.DataObject):
    """Any tokens: special ones, bytes that are no character, white space that a template trims."""
    if form == "messages" and family.template is None:
        return
    tokenizer = family.tokenizer()
    token = st.integers(0, len(tokenizer) - 1)
    of_texts = texts.map(lambda text: tokenizer(text, add_special_tokens=False).input_ids)
    sampled = data.draw(
        st.lists(st.lists(token, min_size=1, max_size=6) | of_texts, min_size=1, max_size=3)
    )
    assert_told_apart(tokenizer, "Say a tree: " if form == "text" else CHAT, sampled)


@every_chat_family
def test_what_a_policy_says_plainly_is_kept(family: Family):
    """As its template writes a reply; of harmony, whose replies have channels, nothing is."""
    tokenizer = family.tokenizer()
    ids = learnt(CHAT, "An oak,\n  or 2 é 🎈.", tokenizer)
    special = special_tokens(tokenizer)
    sampled = ids[: next(place for place, token in enumerate(ids) if place and token in special)]
    (told,) = assert_told_apart(tokenizer, CHAT, [sampled])
    assert told == (not family.name.startswith("gptoss"))
    ended = [*sampled, tokenizer.eos_token_id]
    finished = Response(
        ended, Continuation(tokenizer).text(sampled, last_of(CHAT, tokenizer)), True
    )
    assert reads_back(Encoder(tokenizer, 400, None))({"prompt": CHAT}, [finished]) == [told]


def test_a_reply_that_no_stage_takes_leaves_the_others():
    tokenizer = BY_NAME["qwen_tuned"].tokenizer()
    whole = [tokenizer(text).input_ids for text in ("oak", "<|im_start|>", " ", "\u200b", "pine ")]
    assert assert_told_apart(tokenizer, CHAT, whole) == [True, False, False, False, True]
    assert assert_told_apart(tokenizer, "Tree: ", whole) == [True, False, False, False, True]


def test_thinking_is_kept_where_its_template_writes_it_so():
    tokenizer = BY_NAME["qwen3"].tokenizer()
    as_it_is, moved = "<think>\nx\n</think>\n\noak", "<think>x</think>oak"
    sampled = [tokenizer(text).input_ids for text in (as_it_is, moved)]
    assert assert_told_apart(tokenizer, CHAT, sampled) == [True, False]


def talkative(family: Family, folder: Path, likely: list[str]) -> str:
    """A policy of the family that says these tokens."""
    name, tokenizer = save_family(family, folder)
    policy = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        policy.model.embed_tokens.weight[:, 0] = 0.5
        policy.lm_head.weight.mul_(0.1)[:, 0] = -9.0
        policy.lm_head.weight[tokenizer.convert_tokens_to_ids(likely), 0] = 1.0
    policy.save_pretrained(folder)
    return name


TOOLS = """
TOOL = %d

def by_tool(prompts, responses, completion_ids):
    return [float(TOOL in ids) + 0.01 * len(ids) for ids in completion_ids]
"""


@pytest.mark.parametrize(
    "keep", ["all", "best", "rest", "rs_dpo", "judged", "revised", "revised_pairs"]
)
@pytest.mark.parametrize("form", ["text", "messages"])
def test_no_record_lacks_the_token_that_earned_its_reward(
    tmp_path, monkeypatch, capsys, keep, form
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    family = BY_NAME["qwen_tuned"]
    tokenizer = family.tokenizer()
    letters = [*"abcdefg", "<|im_start|>", "<|im_end|>"]
    policy = talkative(family, tmp_path / "policy", letters)
    prompt = "Say:" if form == "text" else CHAT
    Path("prompts.jsonl").write_text(json.dumps({"prompt": prompt}) + "\n")
    name = f"tools_{form}_{keep}"  # modules are imported once
    Path(f"{name}.py").write_text(TOOLS % tokenizer.convert_tokens_to_ids("<|im_start|>"))
    Path(f"judge_{name}.py").write_text(
        "def longer(prompts, firsts, seconds):\n    return ['first'] * len(firsts)\n"
    )
    Path("principles.txt").write_text("Be brief.\n")
    more: dict[str, Any] = {"reward": f"{name}:by_tool"}
    more = {"principles": "principles.txt"} if keep.startswith("revised") else more
    more = {"judge": f"judge_{name}:longer"} if keep == "judged" else more
    limits = {"max_prompt_tokens": 100, "max_response_tokens": 12}
    options = (
        {"prompts": "prompts.jsonl", "responses_per_prompt": 24, "output_dir": "out"}
        | limits
        | more
    )
    done = generate(GenerateConfig(model=policy, keep=keep, **options))
    assert 0 < done.not_read_back < 24
    assert f"{done.not_read_back} that as data would be other tokens" in capsys.readouterr().out
    kept = records("out")
    load, columns = (
        (load_demonstrations, ("response_ids",))
        if "completion" in kept[0]
        else (load_preferences, ("chosen_ids", "rejected_ids"))
    )
    data, _ = load("out/kept.jsonl", tokenizer, **LIMITS)
    assert len(data) == done.records == len(kept) > 0
    assert all(record.get("reward", 0) < 1 for record in kept)
    assert tokenizer.convert_tokens_to_ids("<|im_start|>") not in {
        n for c in columns for ids in data[c] for n in ids
    }
