"""Runs that a model behind a real vLLM server judges, on a CPU: `bash scripts/test_vllm.sh`."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
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
from fastp3o.rollouts.groups import Group
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
    """Passes questions on to a server, and keeps those that were answered, each with the run that
    has asked: /RUN/v1 is the URL of a run. before: is called with the number of each question of a
    run, from 1, before it is passed on.
    """

    def __init__(self, behind: RealServer):
        super().__init__(Handler)
        self.behind, self.asked = behind, Counter[str]()
        self.before: dict[str, Callable[[int], object]] = {}

    def paid(self, run: str) -> Counter[str]:
        """How often each question of a run was answered, without those of the trial before it."""
        return Counter(text for asking, text in self.requests if asking == run)


class Handler(LocalHandler):
    server: Proxy

    def respond(self, sent: bytes) -> None:
        _, run, path = self.path.split("/", 2)
        text = json.loads(sent)["messages"][0]["content"]
        counts = TRIAL not in text
        with self.server.lock:
            self.server.asked[run] += counts
            if counts and run in self.server.before:
                self.server.before[run](self.server.asked[run])
        try:
            json_body = {"Content-Type": "application/json"}
            url = f"{self.server.behind.url}/{path}"
            reply = httpx.post(url, content=sent, headers=json_body, timeout=600.0)
        except httpx.HTTPError:  # the server is gone: neither is there an answer here
            self.close_connection = True
            return
        if counts and reply.status_code == 200:
            self.server.requests.append((run, text))
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
    """The configuration of a run of three updates with 16 questions each."""
    Path("template.txt").write_text(judged.judge.template)
    settings = {
        "reward": "judge",
        "judge_url": f"{judged.proxy.url}/{folder}/v1",
        "judge_model": "judge",
        "judge_template": "template.txt",
        "judge_requests": 3,
        "comparisons": "circular",
        "responses_per_prompt": 4,
        "prompts_per_update": 2,
        "prompts_per_minibatch": 1,
        "updates": 3,
        "save_every": 1,
    }
    return config(tiny_model, folder, **(settings | changes))


def flags(settings: P3OConfig) -> list[str]:
    """The command line of a configuration."""
    values = {field.name: getattr(settings, field.name) for field in fields(settings)}
    changed = {field.name for field in fields(settings) if values[field.name] != field.default}
    return [part for name in sorted(changed) for part in (f"--{name}", str(values[name]))]


def verdicts(folder: str) -> dict[str, dict]:
    lines = Path(folder, "verdicts.jsonl").read_bytes().splitlines(keepends=True)
    records = [json.loads(line) for line in lines if line.endswith(b"\n")]
    assert len({record["key"] for record in records}) == len(records)
    return {record["key"]: record for record in records}


class LocalAnswer(NamedTuple):
    """letter: of the verdict. preferred: P(the first is better), a tie half."""

    letter: str
    preferred: float


def local_answers(judge: SmallJudge, groups: list[Group]) -> list[tuple[LocalAnswer, LocalAnswer]]:
    """What transformers' greedy answers to both orders of each pair say."""
    tokenizer = AutoTokenizer.from_pretrained(judge.model)
    model = AutoModelForCausalLM.from_pretrained(judge.model, dtype=torch.float32)
    letters = [tokenizer.convert_tokens_to_ids(letter) for letter in "ABC"]

    def answer(prompt: str, first: str, second: str) -> LocalAnswer:
        chat = [{"role": "user", "content": question(prompt, first, second, judge.template)}]
        ids = tokenizer.apply_chat_template(
            chat, add_generation_prompt=True, return_dict=False, return_tensors="pt"
        )
        settings = {"output_scores": True, "return_dict_in_generate": True}
        generated = model.generate(ids, max_new_tokens=16, do_sample=False, **settings)
        tokens = generated.sequences[0, ids.shape[1] :].tolist()
        (place,) = (number for number, token in enumerate(tokens) if token in letters)
        logprobs = generated.scores[place][0].log_softmax(-1)
        first_wins, second_wins, ties = (exp(logprobs[letter].item()) for letter in letters)
        preferred = (first_wins + ties / 2) / (first_wins + second_wins + ties)
        return LocalAnswer("ABC"[letters.index(tokens[place])], preferred)

    pairs = [
        (prompt.text, *(response.text for response in responses)) for prompt, responses in groups
    ]
    return [(answer(p, one, two), answer(p, two, one)) for p, one, two in pairs]


def asking(judge: SmallJudge, proxy: Proxy) -> EndpointComparisons:
    endpoint = ChatEndpoint(f"{proxy.url}/one/v1", "judge", retries=0)
    return EndpointComparisons(
        EndpointJudge(
            endpoint, file=VerdictFile(None), requests=4, template=judge.template, logprobs=True
        )
    )


# --- one comparison -------------------------------------------------------------------------------


def test_probabilities_are_those_of_the_model_in_both_orders(judged):
    groups = groups_of_texts(["a tree", "house"], ["no", "b\ufffd."], ["same", "same"])
    values = asking(*judged).matrix(groups)[:, 0, 1].tolist()
    assert values[2] == 0
    answers = local_answers(judged.judge, groups[:2])
    for (straight, swapped), value in zip(answers, values[:2], strict=True):
        assert abs(straight.preferred - swapped.preferred) > 1e-3  # more than the tolerance
        expected = (straight.preferred + 1 - swapped.preferred) / 2 - 0.5
        assert value == pytest.approx(expected, abs=1e-5)
    assert len(judged.proxy.paid("one")) == 4


@pytest.mark.parametrize("served", ["tiny"], indirect=True)
def test_a_server_that_refuses_log_probs_judges_by_its_text(served, tmp_path, capsys):
    judge, _ = served
    groups = groups_of_texts(["a tree", "house"], ["no", "b\ufffd."], ["", "q;W"])
    points = {("A", "B"): 0.5, ("B", "A"): -0.5}
    expected = [
        points.get((straight.letter, swapped.letter), 0.0)
        for straight, swapped in local_answers(judge, groups)
    ]
    flags = f"{FLAGS} --max-logprobs 1"
    with RealServer(judge.model, flags, tmp_path / "log") as server, Proxy(server) as proxy:
        reward = asking(judge, proxy)
        reward.check(groups[0].prompt)
        assert "gives no log-probs" in capsys.readouterr().out
        assert reward.matrix(groups)[:, 0, 1].tolist() == expected
    # The trial has found it out: none of these was refused.
    assert sum(proxy.paid("one").values()) == proxy.asked["one"] == 6


# --- runs -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGTERM])
def test_a_run_that_is_stopped_ends_with_the_bits_of_one_that_was_not_and_pays_for_no_verdict_twice(
    workplace, tiny_model, judged, sent
):
    proxy = judged.proxy
    train(run(tiny_model, "whole", judged))
    assert_learned(tiny_model, "whole")
    expected = proxy.paid("whole")
    assert set(expected.values()) == {1}
    assert len(expected) == 2 * len(verdicts("whole"))

    stopped = run(tiny_model, "stopped", judged)
    with subprocess.Popen(
        [sys.executable, "-m", "fastp3o", "p3o", *flags(stopped)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    ) as process:
        proxy.before["stopped"] = lambda number: (
            os.kill(process.pid, sent) if number == len(expected) // 2 else None
        )
        said, _ = process.communicate()
    assert sent == signal.SIGTERM or process.returncode == -sent, said.decode()
    assert not Path("stopped", "model").exists(), said.decode()
    kept = verdicts("stopped")
    assert 0 < len(kept) < len(verdicts("whole"))

    # The server has moved.
    train(replace(stopped, judge_url=f"{proxy.url}/resumed/v1", resume=True))
    assert_equal(weights("whole"), weights("stopped"))
    assert metrics("whole") == metrics("stopped")
    assert verdicts("whole") == verdicts("stopped")
    first, second = proxy.paid("stopped"), proxy.paid("resumed")
    # Both orders of what had no verdict yet, and nothing else.
    assert set(second.values()) == {1}
    assert len(second) == 2 * (len(verdicts("whole")) - len(kept))
    assert set(first) | set(second) == set(expected)
    # A killed run had asked for some of it, and had no time to keep the answers.
    assert len(first & second) <= (2 * stopped.judge_requests if sent == signal.SIGKILL else 0)


@pytest.mark.parametrize("served", ["tiny"], indirect=True)
def test_a_run_waits_for_a_server_that_is_restarted(workplace, tiny_model, judged):
    proxy = judged.proxy
    train(run(tiny_model, "whole", judged))
    expected = proxy.paid("whole")

    def restart(number: int) -> None:
        if number == len(expected) // 2:
            proxy.behind.kill()
            threading.Thread(target=proxy.behind.start).start()

    proxy.before["waiting"] = restart
    train(run(tiny_model, "waiting", judged, judge_retries=9))
    assert sum(proxy.asked.values()) > 2 * sum(expected.values())  # some were asked of no server
    assert proxy.paid("waiting") == expected
    assert verdicts("whole") == verdicts("waiting")
    assert_equal(weights("whole"), weights("waiting"))


def assert_learned(tiny_model: str, folder: str) -> None:
    """The judge gave probabilities, wherever it had a verdict, and the policy followed them."""
    records = verdicts(folder).values()
    assert all(("preferred" in record) == (record["verdict"] != "none") for record in records)
    assert all(step["reward_answered"] > 0.8 for step in metrics(folder))
    assert all(0 < step["reward_difference"] < 0.5 for step in metrics(folder))
    start = weights_of_start(tiny_model)
    assert any(not torch.equal(start[name], value) for name, value in weights(folder).items())
