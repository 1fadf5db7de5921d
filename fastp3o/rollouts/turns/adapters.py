"""Wraps text environments of gymnasium, and environments of the package `verifiers`, as ours
(rollouts/README.md).
"""

import asyncio
import json
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, ClassVar

from fastp3o.errors import UserError
from fastp3o.rollouts.turns.calls import UNREADABLE, calls_in

__all__ = ["gymnasium_environment", "verifiers_environment", "verifiers_records"]


def gymnasium_environment(make: Callable[[], Any]) -> type:
    """An environment class for a gymnasium environment whose observations and actions are text. The
    field `reset_seed` of a record is passed to its `reset` as the seed.
    """

    class Gymnasium:
        def reset(self, reset_seed: int | None = None) -> str:
            self.inner = make()
            observation, _ = self.inner.reset(seed=reset_seed)
            return str(observation)

        def step(self, text: str) -> tuple[str, float, bool]:
            observation, reward, terminated, truncated, _ = self.inner.step(text.strip())
            return str(observation), float(reward), bool(terminated or truncated)

        def close(self) -> None:
            self.inner.close()

    return Gymnasium


def verifiers_records(env: Any, rows: Iterable[dict]) -> list[dict]:
    """The prompts for `verifiers_environment(env)`. rows: of the environment's dataset."""
    tools = [
        {"type": "function", "function": tool.model_dump(exclude_none=True)}
        for tool in env.tool_defs or []
    ]
    return [
        {"prompt": row["prompt"], "verifiers": row} | ({"tools": tools} if tools else {})
        for row in rows
    ]


def name_and_arguments(call: str) -> dict[str, str]:
    """A call's parts. One that cannot be read has no name, and the environment says what is
    wrong.
    """
    with suppress(*UNREADABLE):
        content = json.loads(call)
        arguments = json.dumps(content.get("arguments", {}))
        return {"name": str(content["name"]), "arguments": arguments}
    return {"name": "", "arguments": call}


def later_text(before: list, now: list) -> str:
    """What an environment has written after the policy's turn. Raises UserError if it has changed
    what was there before.
    """
    if now[: len(before)] != before:
        raise UserError("the environment has changed earlier messages, and trajectories only grow")
    return "\n".join(message.content for message in now[len(before) + 1 :])


def verifiers_environment(env: Any) -> type:
    """An environment class for a MultiTurnEnv or another environment of verifiers 0.2 or 0.3; its
    model is the policy. The functions of its Rubric are rewards with their weights, given after the
    last turn. A trajectory that one of our limits ends gets none. Raises UserError for a Rubric
    that compares the responses to a prompt, or that has two functions of one name.
    """
    from verifiers.clients import Client
    from verifiers.types import Response, ResponseMessage, ToolCall

    names, weights = env.rubric._get_reward_func_names(), env.rubric._get_reward_weights()
    if env.requires_group_rollouts or len({*names}) < len(names):
        raise UserError(
            f"a Rubric must score each response alone, by functions of different names, got {names}"
        )

    class Verifiers(Client):
        rewards: ClassVar = dict(zip(names, weights, strict=True))

        def __init__(self) -> None:
            """It makes no requests: the policy's turns are what it answers."""

        async def reset(self, verifiers: dict) -> None:
            self.asked, self.answers = asyncio.Queue[Any](), asyncio.Queue[Response]()
            self.rollout = asyncio.ensure_future(env.rollout(verifiers, self, "policy", {}))
            self.rollout.add_done_callback(lambda _: self.asked.put_nowait(None))
            self.prompt = await self.asked.get()

        async def get_response(self, prompt: list, *others: Any, **options: Any) -> Response:
            self.asked.put_nowait(prompt)
            return await self.answers.get()

        async def step(self, text: str) -> tuple[str | None, dict[str, float], bool]:
            calls = [
                ToolCall(id=str(number), **name_and_arguments(call))
                for number, call in enumerate(calls_in(text))
            ]
            message = ResponseMessage(
                content=text, tool_calls=calls or None, finish_reason="stop", is_truncated=False
            )
            self.answers.put_nowait(Response(id="", created=0, model="policy", message=message))
            before, self.prompt = self.prompt, await self.asked.get()
            if self.prompt is not None:
                return later_text(before, self.prompt), {}, False
            state = await self.rollout
            if state["error"] is not None:
                raise state["error"]
            await env.rubric.score_rollout(state)
            await env.rubric.cleanup(state)
            return None, state["metrics"], True

        async def close(self) -> None:
            self.rollout.cancel()
            await asyncio.wait({self.rollout})

    Verifiers.__abstractmethods__ = frozenset()  # of requests
    return Verifiers
