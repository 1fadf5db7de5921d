"""What reward functions get and give beside texts and numbers: chats, metrics, an end of the run;
and math_answer.
"""

import json
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fastp3o.calls.function import FunctionError, FunctionInterruptedError
from fastp3o.calls.time_limit import TookTooLongError, time_limit
from fastp3o.rewards.function import FunctionReward
from fastp3o.rewards.verifiable import math_answer
from fastp3o.training.loop import train
from tests.fastp3o.runs import config, metrics
from tests.fastp3o.together import together

RUNS = Path(__file__).parents[1] / "training" / "runs_of_a_process.py"
FUNCTIONS = """
import os
from rewards_for_tests import varied

def chat(completions, completion_ids, **kwargs):
    for prompt, (message,), ids in zip(kwargs["prompts"], completions, completion_ids, strict=True):
        assert prompt.pop(0) == {"role": "system", "content": "Be brief."} and prompt.pop()["role"] == "user"
        assert message["role"] == "assistant" and len(ids) > 0
    return varied([], [message["content"] for (message,) in completions])

CALLS = []

def logs(prompts, responses, log_metric):
    CALLS.append(len(responses))
    if os.environ.get("RANK", "0") == "0":
        log_metric("calls", len(CALLS))
        log_metric("calls", len(CALLS) + 2)
    return varied(prompts, responses)

def clashes(completions, **kwargs):
    kwargs["log_metric"]("logs_std", 1)
    return varied([], completions)

def interrupts(prompts, responses):
    if len(CALLS) == 3 and os.environ["RANK"] == "1":
        raise KeyboardInterrupt
    return varied(prompts, responses)
"""


@pytest.fixture
def functions(workplace):
    Path("functions.py").write_text(FUNCTIONS)
    yield
    sys.modules.pop("functions", None)


def test_functions_of_trls_form_get_chats_as_messages(functions, tiny_model):
    shutil.copytree(tiny_model, "chat")
    Path("chat/chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.content }} {% endfor %}"
    )
    chats = [
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": word}]
        for word in "abcdefgh"
    ]
    Path("chats.jsonl").write_text("".join(json.dumps({"prompt": chat}) + "\n" for chat in chats))
    given = {"prompts": "chats.jsonl", "updates": 2, "eval_prompts": "chats.jsonl"}
    train(config("chat", "trl", **given, reward="functions:chat"))
    train(config("chat", "own", **given, reward="rewards_for_tests:varied"))
    assert metrics("trl") == metrics("own")


def test_what_a_function_logs_is_a_metric_of_updates_and_evaluations(functions, tiny_model):
    """Each call logs its number and 2 more. The calls: the trials, then evaluations and updates in
    turns.
    """
    logged = {"reward": "functions:logs,rewards_for_tests:vowels", "gold_reward": "functions:logs"}
    train(
        config(tiny_model, "run", **logged, updates=2, eval_prompts="prompts.jsonl", eval_every=2)
    )
    assert [line["reward/calls"] for line in metrics("run")] == [6, 7]
    assert [line["reward/calls"] for line in metrics("run", "eval.jsonl")] == [4, 8]
    assert [line["gold/calls"] for line in metrics("run", "eval.jsonl")] == [5, 9]
    with pytest.raises(
        FunctionError,
        match="reward/clashes logs what would be reward/logs_std, a metric of the run",
    ):
        train(config(tiny_model, "other", reward="functions:clashes,functions:logs"))


def test_two_processes_share_what_one_logs_and_stop_with_a_state_if_one_is_interrupted(
    functions, tiny_model
):
    sizes = "--max_response_tokens 6 --prompts_per_update 8 --prompts_per_minibatch 4 --updates 3 --samples_every 0"
    flags = (
        f"--model {tiny_model} --prompts prompts.jsonl --reward functions:logs,functions:interrupts"
    )
    flags = f"{flags} {sizes} --report_to none --output_dir run"
    done = together(RUNS, "p3o", *flags.split())
    said = "functions:interrupts raised KeyboardInterrupt: stopped after update 2; --resume continues from there"
    assert (done.returncode, said in done.stdout) == (130, True), done.stdout
    assert Path("run/state/step-000002").is_dir()
    # after the trial of the first process
    assert [line["reward/calls"] for line in metrics("run")] == [
        3,
        4,
    ]


def test_an_interrupted_call_is_over_for_the_next_one(rollouts):
    errors = [KeyboardInterrupt()]

    async def interrupted_at_first(prompts, responses):
        if errors:
            raise errors.pop()
        return [1.0] * len(responses)

    reward = FunctionReward("m:f", function=interrupted_at_first)
    with pytest.raises(FunctionInterruptedError, match="m:f raised KeyboardInterrupt"):
        reward(rollouts)
    assert reward(rollouts).tolist() == [[1, 1], [1, 1]]


def test_equal_answers_of_mathematics(monkeypatch):
    pytest.importorskip("math_verify")
    right = [
        (r"\boxed{3}, no, $\boxed{\frac{2}{4}}$.", 0.5),
        ("so\n#### 1,800.", "9 <<2*9>>\n#### 1800"),
    ]
    right += [
        (r"\boxed{(x+1)^2}", r"x^2+2x+1"),
        (r"\boxed{0.0000001}", 1e-7),
        (r"#### 3 \boxed {7}", r"by \boxed{7}"),
    ]
    wrong = [
        ("1/2", "1/2"),
        (r"\boxed{7} or \boxed{8", 7),
        (r"\boxed{9^{9^9}}", 3),
        ("####", 3),
        (r"\boxed{}", 3),
    ]
    responses, answers = zip(*right, *wrong, strict=True)
    assert math_answer([""] * 5, responses[:5], answers[:5]) == [1.0] * 5
    monkeypatch.setattr("fastp3o.rewards.verifiable.ANSWER_SECONDS", 0.5)
    assert math_answer([""] * 5, responses[5:], answers[5:]) == [0.0] * 5
    units = ["#### 18 dollars", "#### 18 dollars and 5 cents", r"\boxed{9 ft.}"]
    assert math_answer([""] * 3, units, [18, 18, "9"]) == [1.0, 0.0, 1.0]
    with pytest.raises(ValueError, match="math-verify reads no mathematics in the answer '東京'"):
        math_answer(["", ""], responses[:2], ["東京", "2"])
    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(math_answer, [""] * 2, responses[:2], answers[:2]).result() == [
            1.0,
            1.0,
        ]
    with pytest.raises(TookTooLongError, match=r"0\.6"), time_limit(0.6):
        math_answer([""] * 9, responses[7:8] * 9, [3] * 9)
