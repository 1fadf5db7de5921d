"""Runs whose responses come from a server, or two, against the engine's."""

import errno
import fcntl
import json
import os
import shutil
import stat
from itertools import pairwise, product
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator

from fastp3o.calls.endpoint import AnswerError, EndpointError
from fastp3o.errors import UserError
from fastp3o.generate.config import GenerateConfig
from fastp3o.generate.loop import generate
from fastp3o.objectives.config.preferences import DPOConfig
from fastp3o.packing.seeds import derived_seed
from fastp3o.rollouts import engine_sampler
from fastp3o.rollouts.turns import kept
from fastp3o.rollouts.vllm import publisher
from fastp3o.rollouts.vllm.publisher import IN_MEMORY, locked_folder, remove_abandoned_weights
from fastp3o.rollouts.vllm.servers import OtherWeightsError, read_completions
from fastp3o.training import preferences as preference
from fastp3o.training.loop import train
from tests.fastp3o.rollouts.vllm.stand_in import StandIn, served_by
from tests.fastp3o.runs import assert_equal, config, metrics, weights
from tests.fastp3o.together import together
from tests.fastp3o.training.test_distributed import FP32, ONLINE, furthest

EVALUATED = {"eval_prompts": "prompts.jsonl", "eval_every": 2, "eval_limit": 4}


def served(tiny_model, folder, *servers, **changes):
    return config(tiny_model, folder, **served_by(*servers) | changes)


def train_like_servers(monkeypatch, run) -> None:
    """Trains with the engine, which draws the random numbers of servers that are asked for one
    prompt at a time.
    """
    response_keys = engine_sampler.response_keys

    def keys(seed, numbers, count):
        return torch.cat(
            [response_keys(derived_seed(seed, int(n)), torch.tensor([0]), count) for n in numbers]
        )

    with monkeypatch.context() as patched:
        for module in (engine_sampler, kept):
            patched.setattr(module, "response_keys", keys)
        train(run)


def assert_close(first: str, second: str, tolerance: float = 1e-4) -> None:
    for file in ("metrics.jsonl", "eval.jsonl"):
        for one, two in zip(metrics(first, file), metrics(second, file), strict=True):
            names = one.keys() - {"ratio/noise", "sampler_gap", "probe_gap"}
            assert {name: two[name] for name in names} == pytest.approx(
                {n: one[n] for n in names}, abs=tolerance
            )
    for name, weight in weights(first).items():
        assert (weight - weights(second)[name]).abs().max() < tolerance


def no_weights_left() -> bool:
    return not list(IN_MEMORY.glob(f"*fastp3o-weights-*-{os.getpid()}*"))


def test_a_run_whose_prompts_two_servers_share_is_the_engines(workplace, tiny_model, monkeypatch):
    changes = {"lora_rank": 2, "learning_rate": 1e-2, **EVALUATED}
    train_like_servers(monkeypatch, config(tiny_model, "engine", **changes))
    with StandIn(tiny_model) as first, StandIn(tiny_model, fault="reversed") as second:
        train(served(tiny_model, "served", first, second, **changes))
    assert_close("engine", "served")
    assert all(step["sampler_gap"] < 1e-4 for step in metrics("served"))
    asked = []
    for server in (first, second):
        # Weights go once an update, and not for an evaluation of weights that the servers have.
        assert (
            server.paths().count("/collective_rpc")
            == server.paths().count("/reset_prefix_cache")
            == 5
        )
        asked += [
            body
            for path, body in server.requests
            if path == "/v1/completions" and body["max_tokens"] == 6
        ]
    assert len(asked) == 4 * 8 + 3 * 4
    assert no_weights_left()
    # What a request says leaves nothing to the server's files.
    body = asked[0]
    assert body["ignore_eos"] is True
    assert body["stop_token_ids"] == [0]
    assert (body["temperature"], body["top_p"], body["top_k"], body["min_p"]) == (1.0, 1.0, 0, 0.0)
    assert (body["repetition_penalty"], body["presence_penalty"], body["frequency_penalty"]) == (
        1.0,
        0.0,
        0.0,
    )
    far_apart = sorted({body["seed"] for body in asked})
    assert min(b - a for a, b in pairwise(far_apart)) > 2**32


@pytest.mark.parametrize(("ahead", "loads"), [(0, 4), (1, 3)])
def test_a_lost_server_gives_its_prompts_to_the_other_and_is_found_again(
    workplace, tiny_model, ahead, loads
):
    """In the second round it is started anew, with its first weights; it misses those of one
    update.
    """
    changes = {"updates": 5, "rounds_ahead": ahead, "learning_rate": 1e-2}
    with StandIn(tiny_model) as only:
        train(served(tiny_model, "whole", only, **changes))
    with StandIn(tiny_model) as first, StandIn(tiny_model) as second:

        def complete(body):
            if first.completions == 2 + 4 + 2 + 2:
                first.load(tiny_model)
                first.completions, first.away = first.completions + 1, 1
            if first.away:
                raise ConnectionError
            return StandIn.complete(first, body)

        first.complete = complete
        train(served(tiny_model, "run", first, second, **changes))
    assert_equal(weights("whole"), weights("run"))
    assert [first.paths().count(path) for path in ("/collective_rpc", "/reset_prefix_cache")] == [
        loads
    ] * 2


WHOLE = {"index": 0, "prompt_token_ids": [9], "token_ids": [5, 6, 7], "finish_reason": "length"}
WHOLE |= {"logprobs": {"token_logprobs": [-1.0] * 3}}


@pytest.mark.parametrize(
    ("choices", "said"),
    [
        ([WHOLE], "which has 1 responses, and 2 were asked for"),
        ([WHOLE, WHOLE | {"token_ids": [5, 6]}], "without a log-prob of each"),
        ([WHOLE, WHOLE | {"token_ids": []}], "a response without tokens"),
        ([WHOLE, WHOLE | {"token_ids": [5, True, 7]}], "a response without tokens"),
        (
            [WHOLE, WHOLE | {"logprobs": {"token_logprobs": [-1.0, float("nan"), -1.0]}}],
            "not a finite number of nats",
        ),
        (
            [WHOLE, WHOLE | {"token_ids": [5, 2, 7]}],
            "which has a response that goes on after its end",
        ),
        (
            [WHOLE, WHOLE | {"token_ids": [5], "logprobs": {"token_logprobs": [-1]}}],
            "response of 1 tokens, cut short",
        ),
        (
            [WHOLE, WHOLE | {"logprobs": {"token_logprobs": [-(10**25)] * 3}}],
            "not a finite number of nats",
        ),
        (
            [WHOLE, {"index": 1} | dict([*WHOLE.items()][2:])],
            "which is not one of vLLM's completions",
        ),
        ([WHOLE, WHOLE | {"finish_reason": "abort"}], "which was cut short"),
        ([WHOLE, {"index": 1, "text": "a"}], "which is not one of vLLM's completions"),
        (
            [WHOLE, WHOLE | {"token_ids": [10**19, 6, 7]}],
            "has token 10000000000000000000, and the policy has 9 tokens",
        ),
        ([WHOLE, WHOLE | {"index": 1, "prompt_token_ids": [8]}], "another prompt"),
        ([WHOLE, WHOLE], "or one of them twice"),
    ],
)
def test_only_whole_responses_with_their_log_probs_are_taken(choices, said):
    """One that was aborted, and an answer of another form, may be better the next time."""
    with pytest.raises(ValueError, match=said) as refused:
        read_completions(
            json.dumps({"choices": choices}).encode(), [9], {"n": 2, "max_tokens": 3}, {2}, 9
        )
    again = said in ("which was cut short", "which is not one of vLLM's completions")
    assert isinstance(refused.value, AnswerError) != again


INTERRUPTED = {"rounds_ahead": 2, "interrupt_rollouts": True}
# Probes ask for 2 prompts before updates 1 and 2; the second update's seventh prompt fails.
WITHIN_THE_SECOND = {"from_completion": 2 + 8 + 2 + 6}


@pytest.mark.parametrize(
    ("fault", "options", "changes", "says"),
    [
        (
            "cut",
            WITHIN_THE_SECOND,
            {},
            "update 2: .*1 tokens, cut short: is its --max-model-len.*--resume continues",
        ),
        ("dead", WITHIN_THE_SECOND, {}, "update 2: .*does not answer.*--resume continues"),
        (
            "off",
            WITHIN_THE_SECOND,
            {},
            "update 2: .*the servers' log-probs of .* nats off the policy's own.*--resume",
        ),
        ("stale", {}, {}, "update 2: .* does not sample from the policy: its log-probs are"),
        (
            "stale",
            {},
            {"rounds_ahead": 1},
            "update 2: .* does not sample from the policy: its log-probs are",
        ),
        ("", {"version": "0.29.1"}, {}, "is vLLM 0.29, and 0.30 or newer is needed"),
        (
            "",
            {"room": 20},
            {},
            "takes sequences of 20 tokens, and prompt and response may have 518",
        ),
        ("busy", {}, {}, "it is serving other clients"),
        (
            "no reload",
            {},
            INTERRUPTED,
            "/collective_rpc answered with status 404.*VLLM_SERVER_DEV_MODE=1",
        ),
        ("no pause", {}, INTERRUPTED, "/pause answered with status 404.*VLLM_SERVER_DEV_MODE=1"),
        (
            "slow",
            {"from_completion": 6},
            {"vllm_time_limit": 0.7},
            r"no end of .* within 0.7 s \(attempts: 2\)",
        ),
    ],
)
def test_a_server_that_fails_ends_the_run_before_it_trains_on_it(
    workplace, tiny_model, fault, options, changes, says
):
    kind = OtherWeightsError if fault == "stale" else EndpointError if fault else UserError
    with StandIn(tiny_model, fault=fault, **options) as server:
        with pytest.raises(kind, match=says) as failure:
            train(served(tiny_model, "run", server, **changes))
        assert "\n" not in str(failure.value)
        assert server.paths().count("/pause") == server.paths().count("/resume")
    if "update 2" in says and not changes:
        assert [step["step"] for step in metrics("run")] == [1]
        assert Path("run/state/step-000001").is_dir()
        with StandIn(tiny_model) as server:
            train(served(tiny_model, "run", server, resume=True))
            train(served(tiny_model, "whole", server))
        assert_equal(weights("whole"), weights("run"))
    # a server that cannot serve is refused before anything begins
    assert Path("run").exists() == bool(fault)
    assert no_weights_left()


def test_one_round_ahead_is_sampled_from_the_weights_before_each_update(
    workplace, tiny_model, monkeypatch
):
    ahead = {"rounds_ahead": 1, **EVALUATED}
    train_like_servers(monkeypatch, config(tiny_model, "engine", **ahead))
    with StandIn(tiny_model) as server:
        train(served(tiny_model, "served", server, **ahead))
    assert_close("engine", "served")
    assert [step["staleness"] for step in metrics("served")] == [0, 1, 1, 1]
    assert all(0 <= step["probe_gap"] < 1e-4 for step in metrics("served"))
    # The policy moves by more than rounding between the update that samples and the one that
    # trains.
    assert all(step["sampler_gap"] > 1e-3 for step in metrics("served")[1:])
    order = [
        path for path in server.paths() if path == "/collective_rpc" or path == "/v1/completions"
    ]
    rounds = "".join("r" if path == "/collective_rpc" else "c" for path in order).split("r")[1:]
    # Probes ask for 2 prompts, before and after a round that was sampled ahead, rounds for 8,
    # evaluations for 4.
    assert [len(part) for part in rounds] == [2 + 4 + 8 + 8 + 2, 2 + 8 + 2, 2 + 4 + 8 + 2, 2 + 4]


def test_a_killed_runs_weights_are_removed(tmp_path):
    host = os.uname().nodename
    names = [
        f"fastp3o-weights-{host}-{2**22 + 1}",
        f"fastp3o-weights-{host}-1",
        "fastp3o-weights-elsewhere-5",
    ]
    for name in names:
        (tmp_path / name / "policy").mkdir(parents=True)
    remove_abandoned_weights(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == set(names[1:])


def test_weights_of_a_process_that_lives_stay_whatever_its_host_and_number_and_those_of_a_killed_one_go(
    tmp_path, monkeypatch
):
    """A process of another container has the same host and number, and its number is nobody's here."""
    accelerator = Accelerator(cpu=True)
    monkeypatch.setattr(os, "getpid", lambda: 2**22 + 1)
    with (
        locked_folder(accelerator, tmp_path) as first,
        locked_folder(accelerator, tmp_path) as second,
    ):
        assert first != second
        (first / "policy").mkdir()
        remove_abandoned_weights(tmp_path)
        assert {*tmp_path.iterdir()} == {first, second}
        killed = tmp_path / f"{first.name[:-12]}{'0' * 12}"
        shutil.copytree(first, killed)  # as a killed process leaves it: nobody keeps its lock
        remove_abandoned_weights(tmp_path)
        assert {*tmp_path.iterdir()} == {first, second}
        monkeypatch.setattr(fcntl, "flock", no_locks)
        remove_abandoned_weights(tmp_path)
        assert {*tmp_path.iterdir()} == {first, second}
    assert not list(tmp_path.iterdir())


def no_locks(*_):
    raise OSError(errno.ENOLCK, "No locks available")


def test_other_users_may_not_read_weights_in_memory(tmp_path, monkeypatch):
    accelerator = Accelerator(cpu=True)
    for in_memory, mode in ((tmp_path, 0o700), (IN_MEMORY, 0o777 & ~umask())):
        monkeypatch.setattr(publisher, "IN_MEMORY", in_memory)
        with locked_folder(accelerator, tmp_path) as folder:
            assert stat.S_IMODE(folder.stat().st_mode) == mode


def umask() -> int:
    before = os.umask(0)
    os.umask(before)
    return before


def test_a_killed_process_with_our_number_stops_no_start(workplace, tiny_model):
    Path("shared").mkdir()
    left = Path(f"shared/fastp3o-weights-{os.uname().nodename}-{os.getpid()}/policy")
    left.mkdir(parents=True)
    with StandIn(tiny_model) as server:
        train(served(tiny_model, "run", server, vllm_folder="shared", updates=1))
    assert [*Path("shared").iterdir()] == [left.parent]  # its process may live


RUNS = Path(__file__).parents[2] / "training" / "runs_of_a_process.py"


def run(folder: str, tiny_model: str, *servers, processes: int = 2, **changes):
    settings = served_by(*servers) | {"model": tiny_model, "output_dir": folder} | changes
    flags = [
        part
        for name, value in settings.items()
        if value is not None
        for part in (f"--{name}", str(value))
    ]
    return together(RUNS, "+", "p3o", *ONLINE, *FP32, *flags, processes=processes)


def test_two_processes_with_two_servers_train_what_one_does(workplace, tiny_model):
    """Weights are spread over the processes, and no process holds them whole."""
    runs = {"run1": {"processes": 1}, "run2": {}, "run3": {"tensor_parallel": 2}}
    for name, own in (runs | {"interrupted": INTERRUPTED | {"updates": 4}}).items():
        with StandIn(tiny_model) as first, StandIn(tiny_model) as second:
            changes = {"rounds_ahead": 1, "updates": 3, "save_every": 1} | own
            done = run(name, tiny_model, first, second, **changes)
            assert done.returncode == 0, done.stdout
            assert first.paths().count("/collective_rpc") == 2
    assert max(furthest("run1", "run2"), furthest("run1", "run3")) < 1e-5
    for one, *others in zip(*map(metrics, runs), strict=True):
        for name, other in product(("reward", "kl", "response_length", "staleness"), others):
            assert other[name] == pytest.approx(one[name], abs=1e-4)


def test_a_server_of_one_process_ends_both(workplace, tiny_model):
    """The second process asks the second prompts, which both servers share: all end with one
    message.
    """
    with StandIn(tiny_model, fault="cut", from_completion=2 + 8 + 2 + 3) as server:
        done = run("run", tiny_model, server)
    assert done.returncode != 0
    assert "update 2" in done.stdout
    assert "--resume continues" in done.stdout
    assert "Traceback" not in done.stdout
    assert Path("run/state/step-000001").is_dir()


def test_generation_keeps_what_servers_sample(workplace, tiny_model):
    settings = {
        "prompts": "prompts.jsonl",
        "reward": "rewards_for_tests:varied",
        "rollout_batch_size": 3,
    }
    settings |= {
        "model": tiny_model,
        "max_prompt_tokens": 32,
        "max_response_tokens": 6,
        "keep_unfinished": True,
    }
    settings["temperature"] = 0.7  # at which no log-probs are needed
    with StandIn(tiny_model) as first, StandIn(tiny_model) as second:
        done = generate(GenerateConfig(output_dir="one", **settings, **served_by(first)))
        generate(GenerateConfig(output_dir="two", **settings, **served_by(first, second)))
    assert (done.prompts, done.responses) == (8, 64)
    assert Path("one/samples.jsonl").read_bytes() == Path("two/samples.jsonl").read_bytes()
    # The weights stay, so they go to each server once a run.
    assert first.paths().count("/collective_rpc") == 2
    assert second.paths().count("/collective_rpc") == 1


def test_evaluations_of_preference_training_are_of_the_weights_so_far(workplace, tiny_model):
    settings = {
        "train_data": "preferences.jsonl",
        "eval_prompts": "prompts.jsonl",
        "max_response_tokens": 8,
    }
    settings |= {
        "model": tiny_model,
        "batch_size": 4,
        "epochs": 2,
        "eval_every": 2,
        "learning_rate": 1e-3,
    }
    settings |= {"report_to": "none", "precision": "fp32", "output_dir": "run"}
    with StandIn(tiny_model) as server:
        preference.train(DPOConfig(**settings, **served_by(server)))
    evaluations = metrics("run", "eval.jsonl")
    assert evaluations[0]["kl"] == pytest.approx(0, abs=1e-4)
    assert abs(evaluations[-1]["kl"]) > 1e-3
    assert server.paths().count("/collective_rpc") == len(evaluations)
