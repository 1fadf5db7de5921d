"""Programs that call `train`: their streams, handlers, forks and models, and what their functions do to the process."""

import faulthandler
import io
import os
import signal
import sys
import threading

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM

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


class Raises(io.TextIOBase):
    def write(self, text):
        raise RuntimeError("no")


def closed() -> io.StringIO:
    stream = io.StringIO()
    stream.close()
    return stream


@pytest.mark.parametrize("stream", [None, closed(), io.TextIOWrapper(io.BytesIO(), "ascii"), Raises()])
def test_printing_ends_no_run(stream, tiny_model, workplace, monkeypatch):
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, stream)
    run(tiny_model, "run", vowels)
    assert sys.stdout is stream
    if isinstance(stream, io.TextIOWrapper):
        assert b"samples at step 2" in stream.buffer.getvalue()


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


def test_a_fork_of_a_program_that_trains_may_train(tiny_model, workplace):
    children = []

    def forks(prompts, responses):
        if len(responses) > 1 and not children:
            children.append(os.fork())
            if children == [0]:
                try:
                    run(tiny_model, "child", vowels, updates=1)
                    os._exit(0)
                finally:
                    os._exit(1)
        return vowels(prompts, responses)

    run(tiny_model, "parent", forks, updates=1)
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
