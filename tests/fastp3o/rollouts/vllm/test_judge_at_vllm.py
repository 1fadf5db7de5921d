"""Runs that a model behind a real vLLM server judges, on a CPU: `bash scripts/test_vllm.sh`."""

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from math import exp
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from fastp3o.objectives.config.p3o import P3OConfig
from fastp3o.rewards.judge import ChatEndpoint, EndpointJudge, question
from fastp3o.rewards.judged import EndpointComparisons
from fastp3o.rewards.verdicts import VerdictFile
from fastp3o.training.loop import train
from tests.fastp3o.groups import groups_of_texts
from tests.fastp3o.local_server import LocalHandler, LocalServer
from tests.fastp3o.rollouts.vllm.real_server import RealServer
from tests.fastp3o.rollouts.vllm.small_judges import SmallJudge, gemma_judge, tiny_judge
from tests.fastp3o.runs import assert_equal, config, metrics, weights, weights_of_start

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]
# Equal questions get equal bits only if nothing else is in their batch or has filled the cache.
FLAGS = "--served-model-name judge --max-num-seqs 1 --no-enable-prefix-caching"
TRIAL = "response"  # one of the two responses that a judge is asked about before a run


class Proxy(LocalServer):
    """Passes questions on to a server, and keeps what was asked and answered: (question, status).
    before: is called with the number of each question, from 1, before it is passed on.
    """

    def __init__(self, behind: RealServer):
        super().__init__(Handler)
        self.behind, self.asked = behind, 0
        self.before: Callable[[int], object] = lambda number: None

    def paid(self) -> Counter[str]:
        """How often each question was answered, without those of the trials before runs."""
        return Counter(
            text for text, status in self.requests if status == 200 and TRIAL not in text
        )


class Handler(LocalHandler):
    server: Proxy

    def respond(self, sent: bytes) -> None:
        text = json.loads(sent)["messages"][0]["content"]
        with self.server.lock:
            if TRIAL not in text:
                self.server.asked += 1
                self.server.before(self.server.asked)
        try:
            json_body = {"Content-Type": "application/json"}
            reply = httpx.post(
                self.server.behind.url + self.path, content=sent, headers=json_body, timeout=600.0
            )
        except httpx.HTTPError:  # the server is gone: neither is there an answer here
            self.close_connection = True
            return
        self.server.requests.append((text, reply.status_code))
        self.answer(reply.status_code, reply.json())


class Judged(NamedTuple):
    judge: SmallJudge
    proxy: Proxy


@pytest.fixture(scope="module", params=["tiny", "gemma"])
def served(
    request: pytest.FixtureRequest,
    tokenizer: PreTrainedTokenizerBase,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[SmallJudge, RealServer]]:
    """A judge and its server."""
    folder = tmp_path_factory.mktemp(request.param)
    judge = gemma_judge(folder) if request.param == "gemma" else tiny_judge(tokenizer, folder)
    log = tmp_path_factory.mktemp("server") / "vllm.log"
    with RealServer(judge.model, FLAGS, log) as server:
        yield judge, server


@pytest.fixture
def judged(served) -> Iterator[Judged]:
    judge, server = served
    with Proxy(server) as proxy:
        yield Judged(judge, proxy)


def run(tiny_model: str, folder: str, judged: Judged, **changes) -> P3OConfig:
    """The configuration of a run of three updates with 32 questions each."""
    Path("template.txt").write_text(judged.judge.template)
    settings = {
        "reward": "judge",
        "judge_url": f"{judged.proxy.url}/v1",
        "judge_model": "judge",
        "judge_template": "template.txt",
        "judge_requests": 3,
        "comparisons": "circular",
        "responses_per_prompt": 4,
        "prompts_per_update": 4,
        "prompts_per_minibatch": 2,
        "updates": 3,
        "save_every": 1,
    }
    return config(tiny_model, folder, **(settings | changes))


def flags(settings: P3OConfig) -> list[str]:
    """The command line of a configuration's changes."""
    changed = {
        name: value
        for name, value in vars(settings).items()
        if value != getattr(P3OConfig, name, None)
    }
    return [part for name, value in changed.items() for part in (f"--{name}", str(value))]


def verdicts(folder: str) -> dict[str, dict]:
    lines = Path(folder, "verdicts.jsonl").read_bytes().splitlines(keepends=True)
    records = [json.loads(line) for line in lines if line.endswith(b"\n")]
    assert len({record["key"] for record in records}) == len(records)
    return {record["key"]: record for record in records}


def local_probability(judge: SmallJudge, prompt: str, first: str, second: str) -> float:
    """P(the first is better), a tie half, by transformers' greedy answer to one order."""
    tokenizer = AutoTokenizer.from_pretrained(judge.model)
    model = AutoModelForCausalLM.from_pretrained(judge.model, dtype=torch.float32)
    chat = [{"role": "user", "content": question(prompt, first, second, judge.template)}]
    ids = tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_dict=False, return_tensors="pt"
    )
    generated = model.generate(
        ids, max_new_tokens=16, do_sample=False, output_scores=True, return_dict_in_generate=True
    )
    answer = generated.sequences[0, ids.shape[1] :].tolist()
    letters = [tokenizer.convert_tokens_to_ids(letter) for letter in "ABC"]
    (place,) = (number for number, token in enumerate(answer) if token in letters)
    logprobs = generated.scores[place][0].log_softmax(-1)
    first_wins, second_wins, ties = (exp(logprobs[letter].item()) for letter in letters)
    return (first_wins + ties / 2) / (first_wins + second_wins + ties)


# --- one comparison -------------------------------------------------------------------------------


def test_probabilities_are_those_of_the_model_in_both_orders(judged, tmp_path):
    endpoint = ChatEndpoint(f"{judged.proxy.url}/v1", "judge")
    judge, file = judged.judge, VerdictFile(tmp_path / "verdicts.jsonl")
    asking = EndpointJudge(endpoint, file=file, requests=4, template=judge.template, logprobs=True)
    groups = groups_of_texts(["a tree", "house"], ["no", "b\ufffd."], ["same", "same"])
    values = EndpointComparisons(asking).matrix(groups)[:, 0, 1].tolist()
    assert values[2] == 0
    for group, value in zip(groups[:2], values, strict=False):
        first, second = (response.text for response in group.responses)
        straight = local_probability(judge, group.prompt.text, first, second)
        swapped = local_probability(judge, group.prompt.text, second, first)
        assert abs(straight - 0.5) > 1e-3  # more than the tolerance
        assert value == pytest.approx((straight + 1 - swapped) / 2 - 0.5, abs=1e-5)
    assert len(judged.proxy.paid()) == 4


# --- runs -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGTERM])
def test_a_run_that_is_stopped_ends_with_the_bits_of_one_that_was_not_and_pays_for_no_verdict_twice(
    workplace, tiny_model, judged, sent
):
    proxy = judged.proxy
    whole = run(tiny_model, "whole", judged)
    train(whole)
    assert_learned(tiny_model, "whole")
    expected = proxy.paid()
    assert set(expected.values()) == {1}
    assert len(expected) == 2 * len(verdicts("whole"))

    proxy.requests.clear()
    stopped = replace(whole, output_dir="stopped")
    command = [sys.executable, "-m", "fastp3o", "p3o", *flags(stopped)]
    begins = proxy.asked
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        proxy.before = lambda number: (
            os.kill(process.pid, sent) if number == begins + len(expected) // 2 else None
        )
        said, _ = process.communicate()
    assert process.returncode == -sent or sent == signal.SIGTERM, said.decode()
    assert not Path("stopped", "model").exists(), said.decode()
    kept, before = verdicts("stopped"), proxy.paid()
    assert 0 < len(kept) < len(verdicts("whole"))

    proxy.requests.clear()
    train(replace(stopped, resume=True))
    assert_equal(weights("whole"), weights("stopped"))
    assert metrics("whole") == metrics("stopped")
    assert verdicts("whole") == verdicts("stopped")
    # Both orders of what had no verdict yet, and nothing else.
    assert sum(proxy.paid().values()) == 2 * (len(verdicts("whole")) - len(kept))
    again = before & proxy.paid()
    assert sum(again.values()) <= (2 * whole.judge_requests if sent == signal.SIGKILL else 0)
    assert set(before) | set(proxy.paid()) == set(expected)


def assert_learned(tiny_model: str, folder: str) -> None:
    """The judge gave probabilities, wherever it had a verdict, and the policy followed them."""
    records = verdicts(folder).values()
    assert all(("preferred" in record) == (record["verdict"] != "none") for record in records)
    assert all(step["reward_answered"] > 0.8 for step in metrics(folder))
    assert all(0 < step["reward_difference"] < 0.5 for step in metrics(folder))
    start = weights_of_start(tiny_model)
    assert any(not torch.equal(start[name], value) for name, value in weights(folder).items())
