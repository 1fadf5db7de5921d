"""Responses of several turns: token by token what was sampled and observed, in samplers and in
whole runs.
"""

import asyncio
import copy
import time
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from fastp3o import UserError, train
from fastp3o.calls.function import FunctionError
from fastp3o.models.packed_model import PackedModel, labeled_logprobs
from fastp3o.objectives.config.p3o import P3OConfig
from fastp3o.objectives.config.policy_gradient import GRPOConfig, RLOOConfig
from fastp3o.objectives.config.ppo import PPOConfig
from fastp3o.packing.pack import Packing
from fastp3o.rewards.environment import EnvironmentReward
from fastp3o.rollouts.engine_sampler import EngineSampler
from fastp3o.rollouts.groups import lengths, pack_groups
from fastp3o.rollouts.turns.adapters import gymnasium_environment
from fastp3o.rollouts.turns.calls import hermes_calls
from fastp3o.rollouts.turns.environment import Environments
from fastp3o.rollouts.turns.observation import chat_observations, plain_observations
from fastp3o.rollouts.turns.sampler import TrajectorySampler
from fastp3o.rollouts.turns.tools import make_tool, tool_environment
from fastp3o.run.log import read_updates
from tests.fastp3o.groups import flat, tokenized
from tests.fastp3o.models.model_families import random_model
from tests.fastp3o.rollouts.environments import AsyncEcho, Echo, OneTurn, games
from tests.fastp3o.runs import assert_resumes, metrics

P, K = 6, 3


@pytest.fixture
def policy(tokenizer) -> PackedModel:
    model = random_model("llama", vocab_size=len(tokenizer), max_position_embeddings=256)
    model.generation_config.eos_token_id = list(range(40))
    return PackedModel(model)


def sampler(policy, tokenizer, make, *, max_turns=4, longest=60, **options):
    first, further = (
        EngineSampler(policy, tokenizer, max_response_tokens=8, batch_size=n) for n in (P, P * K)
    )
    environments, observe = (
        Environments("test:Echo", make, **options),
        plain_observations(tokenizer),
    )
    return TrajectorySampler(
        first, further, tokenizer, environments, observe, max_turns=max_turns, longest=longest
    )


def prompts(tokenizer):
    return tokenized(tokenizer, [f"prompt {p}" * (1 + p % 3) for p in range(P)], range(P))


def sampled(policy, tokenizer, make, **options):
    return sampler(policy, tokenizer, make, **options)(prompts(tokenizer), K, 1)


def test_observations_lie_between_turns_and_only_own_tokens_have_logprobs(policy, tokenizer):
    groups = sampled(policy, tokenizer, Echo)
    assert {len(response.turns) for response in flat(groups)} == {1, 2, 3}
    assert sampled(policy, tokenizer, AsyncEcho) == groups
    for response in flat(groups):
        assert response.turns[-1].end == len(response.ids)
        assert len(response.logprobs) == sum(turn.end - turn.start for turn in response.turns)
        for turn, following in pairwise(response.turns):
            text = tokenizer.decode(response.ids[turn.start : turn.end], skip_special_tokens=True)
            assert response.ids[turn.end : following.start] == tokenizer(f"[{len(text)}]").input_ids
    observed = [
        group._replace(responses=[r._replace(turns=()) for r in group.responses])
        for group in groups
    ]
    for packing in (Packing(200), Packing(200, share_prompts=False)):
        for row, whole in zip(
            pack_groups(groups, packing), pack_groups(observed, packing), strict=True
        ):
            assert torch.equal(row.ends_at, whole.ends_at)
            expected = [
                value
                for g in row.groups
                for response in groups[g].responses
                for value in response.logprobs
            ]
            got = labeled_logprobs(policy, row).detach()
            torch.testing.assert_close(got, torch.tensor(expected), atol=1e-5, rtol=1e-5)
    reward = EnvironmentReward(Echo.rewards)
    turns = torch.tensor(
        [
            [float(sum(bool(t.rewards) for t in r.turns)) for r in group.responses]
            for group in groups
        ]
    )
    assert torch.equal(reward(groups), turns + 0.5 * reward.parts(groups)["even"])
    assert torch.equal(
        lengths(groups).flatten(), torch.tensor([float(len(r.logprobs)) for r in flat(groups)])
    )


def test_one_turn_has_the_bits_of_a_plain_run_and_neither_batch_nor_process_matters(
    policy, tokenizer
):
    plain = EngineSampler(policy, tokenizer, max_response_tokens=8, batch_size=P)(
        prompts(tokenizer), K, 1
    )
    one = sampled(policy, tokenizer, OneTurn, longest=8)
    assert [(r.ids, r.logprobs, r.text) for r in flat(plain)] == [
        (r.ids, r.logprobs, r.text) for r in flat(one)
    ]
    for first, second in zip(
        pack_groups(plain, Packing(64)), pack_groups(one, Packing(64)), strict=True
    ):
        assert torch.equal(first.labeled_at, second.labeled_at)
        assert torch.equal(first.labels, second.labels)
    whole = sampled(policy, tokenizer, Echo)
    halves = [sampler(policy, tokenizer, Echo)(prompts(tokenizer)[i::2], K, 1) for i in range(2)]
    assert [r.ids for r in flat(whole[0::2] + whole[1::2])] == [
        r.ids for r in flat(halves[0] + halves[1])
    ]


WRONG = [
    "no tuple",
    ("a", 1.0),
    (3, 1.0, False),
    (None, 1.0, False),
    ("a", "1", False),
    ("a", float("nan"), False),
]


@pytest.mark.parametrize("answer", [*WRONG, ("a", 1.0, 1), ("a", {"x": 1}, True)])
def test_answers_that_are_none_are_named(policy, tokenizer, answer):
    class Wrong(OneTurn):
        def step(self, text):
            return answer

    with pytest.raises(FunctionError, match=r"test:Echo\.step"):
        sampled(policy, tokenizer, Wrong)


def test_an_environment_that_raises_ends_the_run_or_its_trajectory_and_all_are_closed(
    policy, tokenizer
):
    closed = []

    class Raises(Echo):
        def step(self, text):
            if self.turns == 1:
                raise ValueError("lost the game")
            return super().step(text)

        def close(self):
            closed.append(self)

    with pytest.raises(FunctionError, match="lost the game"):
        sampled(policy, tokenizer, Raises)
    assert len(closed) == P * K
    failed = [
        r for r in flat(sampled(policy, tokenizer, Raises, survives=True)) if r.turns[-1].failure
    ]
    assert failed
    for response in failed:
        assert len(response.turns) == 2
        assert not response.finished
        assert response.turns[-1].failure.endswith("ValueError: lost the game")

    class Apart(Echo):
        def reset(self, prompt):
            super().reset(prompt)
            return f"start {id(self)}"

    with pytest.raises(
        FunctionError,
        match="must return the same first observation for all trajectories of a prompt",
    ):
        sampled(policy, tokenizer, Apart)


@pytest.mark.timeout(0)  # its alarm would take the place of the limit's
def test_an_environment_that_hangs_ends_in_time(policy, tokenizer):
    class Hangs(OneTurn):
        def step(self, text):
            time.sleep(60)

    class AsyncHangs(OneTurn):
        async def step(self, text):
            await asyncio.sleep(60)

    for make in (Hangs, AsyncHangs):
        with pytest.raises(FunctionError, match="has not returned after 1 s"):
            sampled(policy, tokenizer, make, timeout=1.0)


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_chat_observations_continue_as_the_template_writes(tokenizer):
    chat = copy.deepcopy(tokenizer)
    chat.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    chat.chat_template = CHATML
    end = chat.convert_tokens_to_ids("<|im_end|>")
    observe = chat_observations(chat, "tool", {end})
    messages = [
        {"role": "user", "content": "What is 2+2?"},
        {"role": "assistant", "content": "calc"},
    ]
    start = chat.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True)
    ids = [*chat(start).input_ids, *chat("calc").input_ids, end, *observe("4", end)]
    whole = [*messages, {"role": "tool", "content": "4"}]
    text = chat.apply_chat_template(whole, tokenize=False, add_generation_prompt=True)
    assert ids == chat(text).input_ids
    assert observe("<|im_end|>", end).count(end) == observe("4", end).count(end) == 1
    # A policy that stopped with another token gets the closing one as an observation.
    assert observe("4", 5) == [end, *observe("4", end)]
    thinking = "{{ m.content.split('</think>')[-1] if m.role == 'assistant' else m.content }}"
    chat.chat_template, chat.name_or_path = (
        CHATML.replace("{{ m.content }}", thinking),
        "some/thinker",
    )
    with pytest.raises(
        UserError, match="the chat template of some/thinker changes a reply once a message"
    ):
        chat_observations(chat, "tool", {end})


def test_tools_answer_what_a_policy_may_write():
    def add(a: int, b: int) -> int:
        """Adds two numbers.

        Args:
            a: The first.
            b: The second.
        """
        return a + b

    tool = make_tool(add)
    assert tool.schema["function"]["parameters"]["required"] == ["a", "b"]
    kind = tool_environment([tool])
    calls = [
        '{"name": "add", "arguments": {"a": 1, "b": 2}}',
        "{",
        '{"name": "sub"}',
        '{"name": "add"}',
        "[]",
    ]
    text = "\n".join(f"<tool_call>{call}</tool_call>" for call in calls)
    observation, rewards, done = asyncio.run(kind().step(hermes_calls(text)))
    first, *others = observation.splitlines()
    assert (first, rewards, done) == ("3", {"tool_calls": 5, "failed_tool_calls": 4}, False)
    assert all(line.startswith("error: ") for line in others)
    none = {"tool_calls": 0, "failed_tool_calls": 0}
    assert asyncio.run(kind().step(hermes_calls("The sum is 3."))) == (None, none, True)


def test_an_environment_of_gymnasium_is_played_in_text():
    class Counter:
        def reset(self, *, seed):
            self.left = seed
            return {"left": seed}, {}

        def step(self, action):
            self.left -= 1
            return action, 1, self.left == 1, self.left == 0, {}

        def close(self):
            self.left = None

    game = gymnasium_environment(Counter)()
    assert game.reset(reset_seed=2) == "{'left': 2}"
    assert game.step(" up\n") == ("up", 1.0, True)
    game.close()
    assert game.inner.left is None


@pytest.mark.parametrize("objective", [P3OConfig, GRPOConfig, RLOOConfig, PPOConfig])
def test_every_objective_trains_on_trajectories(tiny_model, workplace, objective):
    more = {"eval_prompts": "prompts.jsonl", "ngram_penalty": 0.1, "overlong_margin": 4}
    train(games(tiny_model, "run", objective, **more), environment=Echo, reward=["environment"])
    for line in metrics("run"):
        assert line["turns"] > 1
        assert line["observation_tokens"] > 0 == line["environment_failures"]
        assert line["sampler_gap"] < 1e-4
        assert line["reward/turns"] > 0
    assert metrics("run", "eval.jsonl")[-1]["reward"] > 0
    groups = next(read_updates(Path("run/rollouts.jsonl")))
    assert any(len(response.turns) > 1 for group in groups for response in group.responses)


def test_a_run_with_trajectories_resumes_to_the_bit_also_with_rounds_ahead(tiny_model, workplace):
    settings = {
        "rounds_ahead": 1,
        "save_minutes": 1e-9,
        "dynamic_sampling": 1,
        "mask_truncated": True,
    }
    settings |= {
        "environment": "tests.fastp3o.rollouts.environments:Echo",
        "reward_weights": "1,0.5",
    }
    settings["reward"] = "environment,rewards_for_tests:vowels"
    train(run := games(tiny_model, "run", **settings))
    assert_resumes(run)
