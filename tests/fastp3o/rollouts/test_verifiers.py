"""Environments of the package `verifiers`: with a stand-in for what the adapter calls, and with the
package.
"""

import asyncio
import sys
from types import ModuleType, SimpleNamespace

import pytest

from fastp3o import UserError, train
from fastp3o.rollouts.turns.adapters import verifiers_environment, verifiers_records
from tests.fastp3o.rollouts.environments import games
from tests.fastp3o.runs import metrics


def say(role, content):
    return SimpleNamespace(role=role, content=content)


class Count:
    """Adds the numbers and calls that it is told, as `MultiTurnEnv.rollout` goes on: a stand-in."""

    tool_defs, requires_group_rollouts = None, False

    def __init__(self, names=("total", "half"), rewrites=False):
        self.rubric, self.rewrites, self.cleaned = self, rewrites, 0
        self._get_reward_func_names, self._get_reward_weights = (
            lambda: names,
            lambda: [1.0, 0.5][: len(names)],
        )

    async def rollout(self, row, client, model, sampling):
        prompt, total = [*row["prompt"]], 0
        try:
            while total < row["limit"]:
                said = (
                    await client.get_response(prompt=prompt, model=model, sampling_args=sampling)
                ).message
                total += len(said.tool_calls or [])
                answers = [
                    say("assistant", said.content),
                    say("user", f"{total}"),
                    say("user", "more"),
                ]
                prompt = [*prompt[self.rewrites :], *answers]
        finally:
            self.cleaned += 1
        error = ValueError("out of sandboxes") if total > row["limit"] else None
        return {"total": total, "error": error}

    async def score_rollout(self, state):
        state["metrics"] = {"total": float(state["total"]), "half": state["total"] / 2}

    async def cleanup(self, state):
        self.cleaned += 1


CALLS = '<tool_call>{"name": "a"}</tool_call> and <tool_call>[</tool_call>'


def played(env, limit, *turns):
    async def play():
        one = verifiers_environment(env)()
        await one.reset({"prompt": [say("user", "count")], "limit": limit})
        answers = [await one.step(turn) for turn in turns]
        await one.close()
        return answers

    return asyncio.run(play())


def test_a_rollout_goes_on_with_the_policys_turns_and_is_scored_at_its_end(monkeypatch):
    kinds = dict.fromkeys(("Response", "ResponseMessage", "ToolCall"), SimpleNamespace)
    for name, content in {"": {}, ".clients": {"Client": object}, ".types": kinds}.items():
        module = ModuleType("verifiers" + name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    env = Count()
    assert verifiers_environment(env).rewards == {"total": 1.0, "half": 0.5}
    answers = [
        ("0\nmore", {}, False),
        ("2\nmore", {}, False),
        (None, {"total": 4.0, "half": 2.0}, True),
    ]
    assert played(env, 4, "no call", CALLS, CALLS) == answers
    assert env.cleaned == 2
    assert played(env, 4, CALLS) == [("2\nmore", {}, False)]  # cut by a limit of ours
    assert env.cleaned == 3
    with pytest.raises(ValueError, match="out of sandboxes"):
        played(env, 1, CALLS)
    with pytest.raises(UserError, match="has changed earlier messages"):
        played(Count(rewrites=True), 4, CALLS)
    with pytest.raises(UserError, match="functions of different names"):
        verifiers_environment(Count(names=("total", "total")))


def test_a_run_with_the_package(tiny_model, workplace):
    vf = pytest.importorskip("verifiers")
    datasets = pytest.importorskip("datasets")

    class Parrot(vf.MultiTurnEnv):
        async def env_response(self, messages, state, **kwargs):
            return [{"role": "user", "content": f"[{len(messages)}]"}]

    async def length(completion):
        return float(len(completion))

    rows = datasets.Dataset.from_list(
        [{"prompt": [{"role": "user", "content": f"Say {n}"}]} for n in range(8)]
    )
    env = Parrot(dataset=rows, rubric=vf.Rubric(funcs=[length]), max_turns=2)
    records = [
        record | {"prompt": f"Say {n}"}
        for n, record in enumerate(verifiers_records(env, env.get_dataset()))
    ]
    kind = verifiers_environment(env)
    train(
        games(tiny_model, "run", max_turn_tokens=6),
        prompts=records,
        environment=kind,
        reward="environment",
    )
    assert all(0 < line["reward/length"] <= 3 and line["turns"] > 1 for line in metrics("run"))
