"""Signals of a run stay its own: processes that a reward starts are stopped as anywhere else."""

import multiprocessing
import os
import signal
import threading
import time

import pytest
from accelerate import Accelerator
from tqdm import tqdm

from fastp3o.run import signals as stopping
from fastp3o.run.signals import SIGNALS, Stops

FORK = multiprocessing.get_context("fork")


@pytest.fixture(autouse=True)
def _handlers():
    before = {number: signal.signal(number, signal.SIG_DFL) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


# A signal right after the fork meets a gap before the child has its handlers, in some of many tries.
@pytest.mark.parametrize("waited", [*[0.0] * 20, 0.2])
def test_a_worker_that_is_stopped_ends(waited, capfd):
    with Stops(Accelerator(cpu=True)) as stops:
        worker = FORK.Process(target=time.sleep, args=(20,))
        worker.start()
        worker.join(waited)
        worker.terminate()
        worker.join(5)
        code = worker.exitcode
        worker.kill()
        assert code == -signal.SIGTERM
        assert stops.received == 0
        os.kill(os.getpid(), signal.SIGTERM)
        assert stops.received == signal.SIGTERM
    assert capfd.readouterr().err.count("stopping as soon as") == 1


def take_signals() -> None:
    stopping.ONE_REQUEST = 0.5
    with Stops(Accelerator(cpu=True)) as stops:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)  # as torchrun passes on what its workers have received already
        print(stops.agreed(False), flush=True)
        time.sleep(0.6)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(60)


def test_a_second_signal_ends_at_once(capfd):
    child = FORK.Process(target=take_signals)
    child.start()
    child.join(50)
    assert child.exitcode == -signal.SIGINT
    output = capfd.readouterr()
    assert output.out == "(15, False)\n"
    assert "Traceback" not in output.err


def test_a_worker_that_is_killed_while_it_prints_leaves_the_run_its_lock():
    worker = os.fork()
    if not worker:
        tqdm.get_lock().acquire()
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(worker, 0)
    printing = threading.Thread(target=tqdm.write, args=["the next line"], daemon=True)
    printing.start()
    printing.join(5)
    assert not printing.is_alive()
