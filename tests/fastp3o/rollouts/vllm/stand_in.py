"""A stand-in for a vLLM server: its routes, answered by the engine, with faults that a run must not
pass over.
"""

import json
import threading
import time
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from fastp3o.models.loading import load_policy
from fastp3o.models.packed_model import PackedModel, labeled_logprobs, untempered
from fastp3o.models.tokenizer import load_tokenizer
from fastp3o.packing.pack import Packing, pack
from fastp3o.rollouts.engine_sampler import EngineSampler
from fastp3o.rollouts.groups import POLICY_ITSELF, Prompt, SamplingSettings
from tests.fastp3o.local_server import LocalHandler, LocalServer

# transformers loads one model at a time.
LOADING = threading.Lock()


class EndingOtherwise:
    """A tokenizer with another end of sequence, which may be none of its tokens."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, eos_token_id: int):
        self.tokenizer, self.eos_token_id = tokenizer, eos_token_id

    def __call__(self, *arguments, **options):
        return self.tokenizer(*arguments, **options)

    def __getattr__(self, name: str):
        return getattr(self.tokenizer, name)


class StandIn(LocalServer):
    """Serves the model in `folder`, until it is told to load others. fault: of its answers, see
    `FAULTS`, from the completion with the number `from_completion` on, counted from 0. version,
    room: what it says of itself; room is of tokens. processed: whether log-probs are after
    temperature and truncation (--logprobs-mode processed_logprobs). away: it answers nothing until
    it was asked for its version as often. paused: it keeps requests until it may resume.
    """

    fault, from_completion, version, room, processed, away, paused = (
        "",
        0,
        "0.32.0",
        1024,
        False,
        0,
        False,
    )
    gpus = 1

    def __init__(self, folder: str, **options):
        super().__init__(Handler)
        vars(self).update(options)
        self.tokenizer, self.completions = load_tokenizer(folder), 0
        self.changed, self.policies = threading.Condition(self.lock), []
        self.folder = folder
        self.load(folder)

    def transfer(self, path: str, body: dict) -> dict | None:
        """The answer to a request that belongs to a transfer over NCCL; None for 404."""

    def load(self, folder: str) -> None:
        with LOADING:
            self.policy = load_policy(folder)
        self.policies.append(self.policy)

    def paths(self) -> list[str]:
        return [path for path, _ in self.requests]

    def broken(self) -> str:
        return self.fault if self.completions > self.from_completion else ""

    def complete(self, body: dict) -> dict:
        self.completions += 1
        ends = self.policy.model.generation_config.eos_token_id = body["stop_token_ids"]
        # No token ends a response if none is named.
        tokenizer = EndingOtherwise(self.tokenizer, (ends or [-1])[0])
        self.policy.temperature = body["temperature"]
        settings = SamplingSettings(body["top_k"], body["top_p"], body["min_p"])
        limits = {"max_response_tokens": body["max_tokens"], "batch_size": 1}
        sampler = EngineSampler(self.policy, tokenizer, settings=settings, **limits)
        ((_, responses),) = sampler([Prompt("", body["prompt"])], body["n"], body["seed"])
        if not self.processed and (body["temperature"] != 1 or settings != POLICY_ITSELF):
            responses = [
                r._replace(logprobs=self.raw_logprobs(body["prompt"], r.ids)) for r in responses
            ]
        about = {"prompt_token_ids": body["prompt"]}
        choices = [
            changed(
                about | {"index": index, "finish_reason": "stop" if r.finished else "length"},
                r.ids,
                [*r.logprobs],
            )
            for index, r in enumerate(responses)
        ]
        return {"choices": FAULTS.get(self.broken(), list)(choices)}

    def complete_in_halves(self, body: dict, until) -> dict:
        """As a request that is under way until then: the second half is of the weights that are
        there by that time.
        """
        half = body["max_tokens"] // 2
        answer = StandIn.complete(self, body | {"max_tokens": half})
        self.changed.notify_all()
        assert self.changed.wait_for(until, 60.0)
        for choice in answer["choices"]:
            if choice["finish_reason"] == "length":
                longer = {
                    "prompt": body["prompt"] + choice["token_ids"],
                    "max_tokens": body["max_tokens"] - half,
                }
                (rest,) = StandIn.complete(self, body | longer | {"n": 1})["choices"]
                choice["token_ids"] += rest["token_ids"]
                choice["logprobs"]["token_logprobs"] += rest["logprobs"]["token_logprobs"]
        return answer

    @torch.no_grad()
    def raw_logprobs(
        self, prompt: list[int], ids: list[int], policy: PackedModel | None = None
    ) -> list[float]:
        policy = policy or self.policy
        (row,) = pack([prompt], [[ids]], Packing(10_000))
        with untempered(policy):
            return labeled_logprobs(policy, row).tolist()


def changed(choice: dict, ids: list[int], logprobs: list[float]) -> dict:
    return choice | {"token_ids": ids, "logprobs": {"token_logprobs": logprobs}}


FAULTS = {
    # As with a --max-model-len that has no room for more.
    "cut": lambda choices: [changed(choices[0], [5], [-1.0]), *choices[1:]],
    # Log-probs of other weights.
    "off": lambda choices: [
        changed(
            choice,
            choice["token_ids"],
            [value - 0.5 for value in choice["logprobs"]["token_logprobs"]],
        )
        for choice in choices
    ],
    "reversed": lambda choices: choices[::-1],
}


class Handler(LocalHandler):
    server: StandIn

    def respond(self, sent: bytes) -> None:
        server = self.server
        if server.away:
            server.away -= self.path == "/version"
            self.close_connection = True
            return self.connection.close()
        if self.command == "GET":
            models = [{"id": "policy", "max_model_len": server.room}]
            answers = {"/version": {"version": server.version}, "/v1/models": {"data": models}}
            answers["/get_world_size"] = {"world_size": server.gpus}
            return self.send(answers.get(self.path))
        body, (path, _, query) = json.loads(sent), self.path.partition("?")
        with server.lock:
            server.requests.append((path, body))
            if self.path in ("/pause?mode=keep", "/resume") and server.fault != "no pause":
                server.paused = path == "/pause"
                server.changed.notify_all()
                return self.send({})
            if path == "/collective_rpc":
                # A real one answers 200, too, when it keeps old weights.
                if server.fault != "stale":
                    server.load(body["kwargs"]["weights_path"])
                return self.send({"results": [None]} if server.fault != "no reload" else None)
            if path == "/reset_prefix_cache":
                dropped = query == ("reset_running_requests=true" if server.paused else "")
                return self.send({"success": dropped and server.fault != "busy"})
            if path != "/v1/completions":
                return self.send(server.transfer(path, body))
            server.changed.wait_for(lambda: not server.paused)
            answer = server.complete(body)
        if server.broken() == "dead":
            self.close_connection = True
            self.connection.close()
            threading.Thread(target=server.shutdown).start()
            server.socket.close()
            return None
        if server.broken() == "slow":
            time.sleep(2.0)
        return self.send(answer)

    def send(self, content: object) -> None:
        self.answer(404 if content is None else 200, content)


def served_by(*servers: StandIn) -> dict[str, Any]:
    """The settings of a run whose responses come from these servers."""
    urls = ",".join(server.url for server in servers)
    return {"sampler": "vllm", "vllm_url": urls, "vllm_time_limit": 60.0}
