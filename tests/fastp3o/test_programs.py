"""Programs that call `train`: their streams, handlers, forks and models, and what their functions do to the process."""

import asyncio
import faulthandler
import io
import os
import signal
import sys
import threading
import time

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, LlamaForCausalLM

from fastp3o import UserError, train
from fastp3o.named_function import FunctionError
from fastp3o.script import lasting_output
from tests.fastp3o.runs import assert_equal, config, weights

PROMPTS = [{"prompt": f"Say {word}:"} for word in ("tree", "house", "river", "cloud", "stone", "apple", "eagle", "ö")]


def run(tiny_model, folder, reward, **changes):
    settings = {"prompts": "", "reward": "", "updates": 2, "samples_every": 1} | changes
    return train(config(tiny_model, folder, **settings), prompts=PROMPTS, reward=reward)


def vowels(prompts, responses):
    return [sum(c in "aeiou" for c in response) / 4 for response in responses]


async def awaited_vowels(prompts, responses):
    return vowels(prompts, responses)


class Raises(io.TextIOBase):
    def write(self, text):
        raise RuntimeError("no")


class Lines(list):
    write = list.append  # a stream that can only be written to, and counts as false while it is empty


def closed() -> io.StringIO:
    stream = io.StringIO()
    stream.close()
    return stream


@pytest.mark.parametrize("stream", [None, closed(), io.TextIOWrapper(io.BytesIO(), "ascii"), Raises(), Lines()])
def test_printing_ends_no_run(stream, tiny_model, workplace, monkeypatch):
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, stream)
    run(tiny_model, "run", vowels)
    assert sys.stdout is stream
    if isinstance(stream, io.TextIOWrapper):
        assert b"samples at step 2" in stream.buffer.getvalue()
    if isinstance(stream, Lines):
        assert "samples at step 2" in "".join(stream)


def test_a_pipe_that_nobody_reads_is_told_once():
    reader, writer = os.pipe()
    os.close(reader)
    told = io.StringIO()
    before = sys.stdout, sys.stderr
    with os.fdopen(writer, "w") as pipe:
        sys.stdout, sys.stderr = pipe, told
        try:
            with lasting_output():
                for _ in range(3):
                    print("x" * 100_000)
        finally:
            sys.stdout, sys.stderr = before
    assert told.getvalue().count("standard output takes no more (Broken pipe)") == 1


def test_what_a_reward_changes_for_the_process_is_put_back_and_its_error_is_named(tiny_model, workplace):
    class UnspeakableError(Exception):
        def __str__(self):
            raise KeyError

    def greedy(prompts, responses):
        torch.set_num_threads(torch.get_num_threads() + 1)
        torch.set_autocast_enabled("cpu", True)
        return vowels(prompts, responses)

    def fails(prompts, responses):
        raise UnspeakableError if len(responses) > 1 else ValueError("\x1b[31mred")

    threads = torch.get_num_threads()
    run(tiny_model, "plain", vowels)
    run(tiny_model, "greedy", greedy)
    assert_equal(weights("plain"), weights("greedy"))
    assert torch.get_num_threads() == threads
    with pytest.raises(FunctionError, match=r"ValueError: \\x1b\[31mred"):
        run(tiny_model, "fails", fails)
    calls = iter([vowels, fails])
    with pytest.raises(FunctionError, match="UnspeakableError: its own text cannot be made"):
        run(tiny_model, "later", lambda prompts, responses: next(calls)(prompts, responses))


@pytest.mark.parametrize("awaits", [False, True])
def test_a_fork_of_a_program_that_trains_may_train(awaits, tiny_model, workplace):
    children = []

    def forks(prompts, responses):
        if len(responses) > 1 and not children:
            children.append(os.fork())
            if children == [0]:
                try:
                    run(tiny_model, "child", awaited_vowels if awaits else vowels, updates=1)
                    os._exit(0)
                finally:
                    os._exit(1)
        return vowels(prompts, responses)

    async def awaited_forks(prompts, responses):
        return forks(prompts, responses)

    run(tiny_model, "parent", awaited_forks if awaits else forks, updates=1)
    assert os.waitpid(children[0], 0)[1] == 0
    assert_equal(weights("parent"), weights("child"))


def test_faulthandlers_signal_is_given_back(tiny_model, workplace):
    with open("dump", "w") as dump:
        faulthandler.register(signal.SIGUSR1, file=dump)
        try:
            run(tiny_model, "run", vowels, updates=1)
            os.kill(os.getpid(), signal.SIGUSR1)  # would end the process
        finally:
            faulthandler.unregister(signal.SIGUSR1)
    assert os.path.getsize("dump")
    assert threading.current_thread() is threading.main_thread()


def test_code_that_a_copy_of_the_weights_would_lack_is_refused(tiny_model, workplace):
    class Mine(LlamaForCausalLM):
        pass

    def patched(model):
        model.model.layers[0].forward = model.model.layers[0].forward

    def hooked(model):
        model.lm_head.register_forward_hook(lambda *_: None)

    for change, what in ((patched, r"a forward method of its own in model\.layers\.0"), (hooked, "a hook in lm_head")):
        model = AutoModelForCausalLM.from_pretrained(tiny_model)
        change(model)
        with pytest.raises(UserError, match=f"model has {what}"):
            train(config("", "run", prompts="", reward=""), model=model, prompts=PROMPTS, reward=vowels)
    model = Mine.from_pretrained(tiny_model)
    with pytest.raises(UserError, match="model has a class of its own, Mine"):
        train(config("", "run", prompts="", reward=""), model=model, prompts=PROMPTS, reward=vowels)


def test_a_model_of_which_a_copy_would_compute_or_train_otherwise_is_refused(tiny_model, workplace):
    def begin(change=None, **settings):
        model = AutoModelForCausalLM.from_pretrained(tiny_model)
        if change is not None:
            change(model)
        train(config("", "run", prompts="", reward="", **settings), **{"model": model, "reward": vowels} | objects)

    objects = {"prompts": PROMPTS}
    changes = {
        r"a Tanh of its own in model\.layers\.0": lambda layers: setattr(layers[0].mlp, "act_fn", torch.nn.Tanh()),
        r"another scaling in model\.layers\.1": lambda layers: setattr(layers[1].self_attn, "scaling", 0.1),
        r"a hook in model\..*norm\.weight": lambda layers: layers[0].input_layernorm.weight.register_hook(torch.abs),
        "frozen weights beside others": lambda layers: layers.requires_grad_(False),
    }
    for what, change in changes.items():
        with pytest.raises(UserError, match=f"model has {what}"):
            begin(lambda model, change=change: change(model.model.layers))
    judge = AutoModelForSequenceClassification.from_pretrained(tiny_model, num_labels=1)
    judge.score.register_forward_hook(lambda module, inputs, output: -output)
    objects["reward"] = judge
    with pytest.raises(UserError, match="model has a hook in score"):
        begin()
    del objects["reward"]
    begin(lambda m: m.gradient_checkpointing_enable(), updates=1)  # transformers' own hook changes nothing


def test_what_a_function_returns_or_leaves_in_the_process_is_its_own_too(tiny_model, workplace, monkeypatch):
    class Unlistable:
        def tolist(self):
            raise SystemExit

    def imprecise(prompts, responses):
        torch.set_float32_matmul_precision("medium")
        sys.stdout = object()
        return vowels(prompts, responses)

    def fails(prompts, responses):
        raise ValueError("later") if len(responses) > 1 else SystemExit

    run(tiny_model, "imprecise", imprecise)
    assert torch.get_float32_matmul_precision() == "highest"
    with pytest.raises(FunctionError, match="gives no list: SystemExit"):
        run(tiny_model, "unlistable", lambda prompts, responses: Unlistable())
    monkeypatch.setattr(sys, "tracebacklimit", 0, raising=False)
    calls = iter([vowels, vowels, fails])
    with pytest.raises(FunctionError, match=r"update 2: .*: ValueError: later"):
        run(tiny_model, "later", lambda prompts, responses: next(calls)(prompts, responses))


def test_an_async_reward_that_blocks_leaves_the_next_run_another_loop(tiny_model, workplace):
    alarm = signal.signal(signal.SIGALRM, signal.SIG_DFL)  # pytest-timeout has it otherwise

    async def blocks(prompts, responses):
        return time.sleep(4) if len(responses) > 1 else [0.0]

    async def notebook():
        with pytest.raises(FunctionError, match="has not returned after"):
            run(tiny_model, "blocked", blocks, reward_timeout=0.5)
        run(tiny_model, "good", awaited_vowels, updates=1)

    try:
        asyncio.run(notebook())
    finally:
        signal.signal(signal.SIGALRM, alarm)
