"""Sampling in environments, behind a prefix, and the reward that compares log-probs with examples
and without.
"""

import copy
import json
from pathlib import Path

import pytest
import torch

from fastp3o.data.tokens import tokenize
from fastp3o.errors import UserError
from fastp3o.evaluation.config import EvaluateConfig, WinRateConfig
from fastp3o.evaluation.win_rates import by_reward, prompts_for, respond, responses_of_all
from fastp3o.generate.loop import generate
from fastp3o.objectives.config.p3o import P3OConfig
from fastp3o.rollouts.groups import Group, Prompt, Response, lengths
from fastp3o.rollouts.prefix import Prefix
from tests.fastp3o.evaluation.test_win_rates import save
from tests.fastp3o.generate.test_generate import config, contents, records
from tests.fastp3o.groups import flat
from tests.fastp3o.rollouts.environments import LETTERS

PLAYED = {
    "environment": "tests.fastp3o.rollouts.environments:Words",
    "reward": "environment",
    "prompts": "answers.jsonl",
    "stop_strings": LETTERS,
}
PLAYED |= {"max_turns": 3, "max_turn_tokens": 6, "max_response_tokens": 30, "max_prompt_tokens": 32}
EXAMPLES = "Say moon: moon\nSay sun: sun\n"


@pytest.fixture
def games(workplace):
    Path("examples.txt").write_text(EXAMPLES)


def test_turns_with_their_rewards_are_in_the_samples(games, tiny_model):
    played = PLAYED | {"keep": "none"}
    done = generate(config(tiny_model, "run", **played))
    assert (done.responses, done.records, contents("run")[1]) == (32, 0, b"")
    several = 0
    for line in records("run", "samples.jsonl"):
        for text, reward, turns in zip(
            line["responses"], line["rewards"], line["turns"], strict=True
        ):
            *said, last = (turn["text"] for turn in turns)
            assert text == "".join(f"{one}[{len(one)}]" for one in said) + last
            parts = [turn["rewards"] for turn in turns]
            assert reward == sum(part.get("turns", 0) + 0.5 * part.get("even", 0) for part in parts)
            several += len(turns) > 1
        assert line["lengths"] == [
            sum(turn["end"] - turn["start"] for turn in turns) for turns in line["turns"]
        ]
    assert several > 4
    samples, _ = contents("run")
    Path("run/samples.jsonl").write_bytes(samples[: len(samples) // 2])
    generate(config(tiny_model, "run", resume=True, **played))
    assert contents("run")[0] == samples
    for keep in ("best", "rs_dpo"):
        with pytest.raises(
            UserError, match=f"--keep {keep} would train on what the --environment says"
        ):
            config(tiny_model, "other", keep=keep, **PLAYED)
    with pytest.raises(ValueError, match=r"a value, which the environment .*:Words asks for"):
        generate(config(tiny_model, "other", **played | {"prompts": "prompts.jsonl"}))


def test_environments_reward_evaluations_and_win_rates(games, tiny_model, tokenizer):
    settings = EvaluateConfig(model=tiny_model, responses_per_prompt=3, **PLAYED)
    one = respond(tiny_model, tokenizer, prompts_for(tokenizer, settings), settings)
    total, turns, even = (one.rewards[f"environment{part}"] for part in ("", "/turns", "/even"))
    assert torch.equal(total, turns + even / 2)
    assert total.max() > total.min()
    assert (
        one.mean_tokens
        == lengths(one.groups).mean()
        < max(len(response.ids) for response in flat(one.groups))
    )
    save(tiny_model, "other", noise=0.2)
    pair = responses_of_all(WinRateConfig(models=f"{tiny_model},other", **PLAYED))
    assert len(set(by_reward(*pair))) > 1
    turn = one.groups[0].responses[0].turns[0]
    same = [
        Response([1], "a", True, None, (turn._replace(rewards={"turns": value}),))
        for value in (0.0, 1.0)
    ]
    groups = [[Group(Prompt("p", [1]), [response])] for response in same]
    hidden = [
        type(one)(group, {"environment": torch.tensor([[n]])}) for n, group in enumerate(groups)
    ]
    assert by_reward(*hidden) == ["second"]
    kinds = (EvaluateConfig, {"model": "m"}), (WinRateConfig, {"models": "a,b"})
    for kind, more in (*kinds, (P3OConfig, {"model": "m", "output_dir": "o"})):
        with pytest.raises(UserError, match="--reward environment needs an --environment"):
            kind(prompts="p", reward="environment", **more)


def test_a_prefix_is_sampled_behind_and_seen_by_nothing_else(games, tiny_model, tokenizer):
    prompts = records(".", "prompts.jsonl")
    whole = [{"prompt": EXAMPLES + line["prompt"]} for line in prompts]
    Path("whole.jsonl").write_text("".join(json.dumps(line) + "\n" for line in whole))
    generate(config(tiny_model, "prefixed", prefix="examples.txt"))
    generate(config(tiny_model, "whole", prompts="whole.jsonl", max_prompt_tokens=64))
    generate(config(tiny_model, "plain"))
    names = ("prefixed", "whole", "plain")
    prefixed, given, plain = (
        [line["responses"] for line in records(name, "samples.jsonl")] for name in names
    )
    assert prefixed == given != plain
    assert [line["prompt"] for line in records("prefixed")] == [line["prompt"] for line in prompts]
    given = {"model": tiny_model, "prompts": "prompts.jsonl", "reward": "rewards_for_tests:vowels"}
    settings = EvaluateConfig(**given, prefix="examples.txt")
    groups = respond(tiny_model, tokenizer, prompts_for(tokenizer, settings), settings).groups
    given = [(line["prompt"], tokenizer(line["prompt"]).input_ids) for line in prompts]
    assert [(group.prompt.text, group.prompt.ids) for group in groups] == given
    Path("examples.txt").write_text("other")
    with pytest.raises(UserError, match="content has changed since the run began: --prefix"):
        generate(config(tiny_model, "prefixed", prefix="examples.txt", resume=True))
    Path("examples.txt").write_text("x" * 2040)
    with pytest.raises(UserError, match="take up to 2078 tokens together"):
        generate(config(tiny_model, "other", prefix="examples.txt"))


def test_what_a_tokenizer_or_template_puts_first_stays_first(games, tokenizer):
    begins = copy.deepcopy(tokenizer)
    begins.add_special_tokens({"bos_token": "<s>"})
    ids = tokenize(tokenizer, [EXAMPLES], control=False)[0]
    for given, expected in (
        ([7, 8], [*ids, 7, 8]),
        ([begins.bos_token_id, 7], [begins.bos_token_id, *ids, 7]),
    ):
        assert Prefix(begins, "examples.txt").before(Prompt("p", given)) == Prompt("p", expected)
    Path("examples.txt").write_text("<end>")
    assert tokenizer.eos_token_id not in Prefix(tokenizer, "examples.txt").ids
