"""Brings the policy's weights to vLLM servers, and checks that the servers sample from them."""

import fcntl
import os
import re
import secrets
import shutil
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from itertools import chain, takewhile
from pathlib import Path
from statistics import fmean
from typing import Any

import httpx
import psutil  # type: ignore[import-untyped]
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

from fastp3o.calls.endpoint import EndpointError
from fastp3o.config import PolicyConfig, SamplerConfig
from fastp3o.errors import UserError
from fastp3o.models.packable import PROMPTS, TOLERANCE, within_vocabulary
from fastp3o.models.packed_model import PackedModel, evaluation_mode, labeled_logprobs, untempered
from fastp3o.models.save import write_model
from fastp3o.packing.pack import Packing, pack
from fastp3o.rollouts.groups import POLICY_ITSELF, SamplingSettings
from fastp3o.rollouts.vllm.nccl_transfer import NCCLTransfer
from fastp3o.rollouts.vllm.servers import (
    Completion,
    OtherWeightsError,
    Question,
    Servers,
    completion_settings,
)
from fastp3o.runtime.context import Context
from fastp3o.runtime.processes import on_every_process, on_main_process, whole_folder

IN_MEMORY = Path("/dev/shm")
LOCAL = {"localhost", "127.0.0.1", "::1"}
# The name has the process that writes it, and what no other folder has: processes of other
# containers, or that were killed, may have the same host and number. Earlier versions had no token.
NAME = re.compile(r"fastp3o-weights-(?P<host>.+)-(?P<process>\d+)(\.[0-9a-f]{12})?")
LOCK = "lock"  # a file that the writing process keeps locked
PROBE_TOKENS = 8
CERTAIN = 1e-6  # nats, of a token that is the only one


# --- publishing -----------------------------------------------------------------------------------


class Publisher:
    """Brings a policy's weights to vLLM servers, if they have moved since it was last called.

    All processes call it. A sharded policy's weights are gathered one after the other, LoRA
    adapters are merged. After the first weights and the first new ones, after those that a lost
    server has missed, and after all if `probes_always`, a few responses of each server must have
    the log-probs that the policy gives them.

    version: another number after each optimizer step. probes_always: for responses that train a
    later policy, so that nothing else compares the two. tolerant: whether servers may compute in
    half precision where the policy does not. logprobs_as_drawn: whether log-probs must be after
    temperature and truncation, which vLLM's are not by default. interrupts: whether responses under
    way go on from new weights; otherwise these wait for them.

    Raises EndpointError if a server does not answer, and ValueError for one that cannot take the
    policy's sequences, or a folder that servers do not share.
    """

    def __init__(
        self,
        context: Context,
        config: PolicyConfig,
        policy: PackedModel,
        version: Callable[[], int] = int,
        *,
        probes_always: bool = False,
        tolerant: bool = False,
        logprobs_as_drawn: bool = False,
        interrupts: bool = False,
    ):
        self.accelerator, self.precision, self.tokenizer, *_ = context
        self.policy, self.version, self.probes_always = policy, version, probes_always
        tokens = policy.model.config.get_text_config().vocab_size
        limits = {
            "requests": config.vllm_requests,
            "time_limit": config.vllm_time_limit,
            "vocabulary": tokens,
        }
        self.servers = Servers(config.vllm_urls, interrupts=interrupts, **limits)
        passes = self.precision.autocast or self.precision.weights
        self.tolerance = TOLERANCE[torch.bfloat16 if tolerant else passes]
        self.published: int | None = None
        self.reloads = 0
        self.gap: float | None = None  # of the last probe
        # to the last probe, by server, of each prompt
        self.answers: dict[str, list[list[Completion]]] = {}
        on_main_process(
            self.accelerator, lambda: self.servers.require_usable(config.longest_sequence)
        )
        if logprobs_as_drawn:
            on_main_process(self.accelerator, self.require_logprobs_as_drawn)
        self.transfer: NCCLTransfer | None = None
        if config.vllm_weights == "nccl":
            self.transfer = NCCLTransfer(self.accelerator, policy, passes, self.servers)
            return
        shared = shared_folder(config)
        on_main_process(self.accelerator, lambda: remove_abandoned_weights(shared))
        self.shared = shared

    def __call__(self) -> None:
        """Raises EndpointError on all processes if a server does not take the weights, or samples
        from others.
        """
        version = self.version()
        if version == self.published:
            return
        if not self.servers.interrupts:
            # Other weights would change the responses that are under way.
            self.servers.wait()
        self.servers.lost |= set().union(*gather_object([self.servers.lost]))
        if self.published is not None and self.probes_always:
            self.require_unmoved(self.published)
        self.published = None
        # What a lost server was asked before may still come, from other weights.
        busy = set().union(
            *gather_object([{url for url in self.servers.lost if self.servers.busy[url]}])
        )
        returned = on_main_process(
            self.accelerator, lambda: self.servers.found_again(self.servers.lost - busy)
        )
        self.servers.lost -= returned
        if not self.servers.present:
            raise EndpointError(f"no server responds anymore: {', '.join(self.servers.urls)}")
        if self.transfer:
            self.change_weights(partial(self.transfer, restarted=bool(returned)))
        else:
            self.bring()
        if self.reloads < 2 or self.probes_always or returned:
            self.probe(version)
        self.servers.lost |= on_main_process(self.accelerator, lambda: self.servers.lost)
        self.published, self.reloads = version, self.reloads + 1

    def bring(self) -> None:
        """Writes the weights to a folder, has the servers read them, and removes the folder."""
        through = self.shared
        try:
            with locked_folder(self.accelerator, self.shared) as folder:
                through = place = folder / "policy"
                with whole_folder(self.accelerator, place) as unfinished:
                    write_model(
                        self.accelerator,
                        self.policy,
                        self.tokenizer,
                        unfinished,
                        self.precision.weights,
                    )
                load = partial(self.servers.load, str(place))
                self.change_weights(lambda: on_main_process(self.accelerator, load))
        except OSError as error:  # such as a folder that is gone, or memory that is full
            raise EndpointError(
                f"the servers cannot get the weights through {through}: {error}"
            ) from error

    def change_weights(self, load: Callable[[], None]) -> None:
        """Calls `load` on all processes, which gives the servers new weights, while requests in
        progress are paused.
        """
        try:
            on_main_process(self.accelerator, self.servers.pause)
            load()
            on_main_process(self.accelerator, self.servers.drop_keys)
            # Before they go on, all processes know whose answers no longer count.
            self.servers.lost |= on_main_process(self.accelerator, lambda: self.servers.lost)
            on_main_process(self.accelerator, self.servers.resume)
        finally:
            if self.accelerator.is_main_process:
                with suppress(EndpointError):  # the first error says more
                    self.servers.resume()

    # --- probes: whether servers have the weights, and say log-probs as drawn ---------------------

    def require_logprobs_as_drawn(self) -> None:
        """Raises UserError if log-probs are before temperature and truncation. After them a top_k
        of 1 has 0.
        """
        settings = completion_settings(SamplingSettings(top_k=1), 1.0, PROBE_TOKENS, set()) | {
            "n": 1
        }
        for url, ((completion,), *_) in self.answers_of_each(settings, 0).items():
            if min(completion.logprobs) < -CERTAIN:
                raise UserError(
                    f"{url} gives log-probs before temperature and truncation: set --logprobs-mode processed_logprobs"
                )

    def probe(self, seed: int) -> None:
        """Compares log-probs of a few responses from each server with the policy's own, at
        temperature 1: whether a server's are after the temperature does not matter then.
        """
        self.answers = self.probe_answers(seed)
        gaps = {
            url: self.mean_gap(self.probe_prompts, answers) for url, answers in self.answers.items()
        }
        on_every_process(self.accelerator, lambda: self.require_small(gaps))
        self.gap = max(gaps.values())

    @property
    def probe_prompts(self) -> list[list[int]]:
        return [within_vocabulary(self.policy.model, ids) for ids in PROMPTS]

    def probe_answers(self, seed: int) -> dict[str, list[list[Completion]]]:
        settings = completion_settings(POLICY_ITSELF, 1.0, PROBE_TOKENS, set()) | {"n": 2}
        return on_main_process(self.accelerator, lambda: self.answers_of_each(settings, seed))

    def answers_of_each(
        self, settings: dict[str, Any], seed: int
    ) -> dict[str, list[list[Completion]]]:
        """Each server's completions of each prompt of the probe, for servers that stay available."""
        urls, prompts = self.servers.present, list(enumerate(self.probe_prompts))
        questions = [
            Question((url, place), ids, seed, url) for url in urls for place, ids in prompts
        ]
        answers = dict(self.servers.complete(questions, settings, end_ids=set()))
        if self.servers.present != urls:  # others have answered for one that was lost
            return self.answers_of_each(settings, seed)
        return {url: [answers[url, place] for place, _ in prompts] for url in urls}

    def require_unmoved(self, seed: int) -> None:
        """Raises OtherWeightsError if a server no longer has the weights with which it answered the
        last probe: what it has sampled since is nobody's. The policy itself has moved; the same
        requests have the same answers.
        """
        for url, now in self.probe_answers(seed).items():
            pairs = list(
                zip(chain.from_iterable(self.answers[url]), chain.from_iterable(now), strict=True)
            )
            # Rounding may part two responses somewhere; up to there they can be compared.
            same = [
                list(takewhile(lambda ids: ids[0] == ids[1], zip(old.ids, new.ids, strict=False)))
                for old, new in pairs
            ]
            gaps = [
                abs(old.logprobs[n] - new.logprobs[n])
                for (old, new), prefix in zip(pairs, same, strict=True)
                for n in range(len(prefix))
            ]
            if sum(map(bool, same)) < len(pairs) / 2 or fmean(gaps) > self.tolerance:
                raise OtherWeightsError(f"{url} has lost the policy's weights: was it restarted?")

    def require_small(self, gaps: dict[str, float]) -> None:
        for url, gap in gaps.items():
            if not gap <= self.tolerance:
                raise OtherWeightsError(
                    f"{url} does not sample from the policy: its log-probs are {gap:.2g} nats a token off the policy's "
                    f"own, more than {self.tolerance:g}. It kept others, or its --dtype is not the run's --precision"
                )

    @torch.no_grad()
    def mean_gap(self, prompts: list[list[int]], completions: list[list[Completion]]) -> float:
        """The mean difference between the log-probs of completions as servers and as the policy
        compute them, in nats per token.
        """
        responses = [[list(completion.ids) for completion in group] for group in completions]
        (row,) = pack(prompts, responses, Packing(tokens_per_row=1000))
        with evaluation_mode(self.policy), untempered(self.policy), self.accelerator.autocast():
            expected = labeled_logprobs(self.policy, row.to(self.accelerator.device))
        logprobs = torch.tensor(
            [
                value
                for g in row.groups
                for completion in completions[g]
                for value in completion.logprobs
            ]
        )
        return (logprobs.to(expected) - expected).abs().mean().item()


# --- the folder of weights ------------------------------------------------------------------------


def shared_folder(config: SamplerConfig) -> Path:
    """The folder through which servers get weights: `vllm_folder`, or one in shared memory for
    servers on this machine. Raises ValueError if it does not exist, or if servers on other machines
    could not see it.
    """
    if config.vllm_folder:
        folder = Path(config.vllm_folder)
        if not folder.is_dir():
            raise UserError(f"--vllm_folder {folder} is not a folder")
        return folder.resolve()
    away = [url for url in config.vllm_urls if httpx.URL(url).host not in LOCAL]
    if away or not IN_MEMORY.is_dir():
        raise UserError(
            f"--vllm_folder must name a folder that this machine and {away[0] if away else config.vllm_urls[0]} share, "
            "in which the servers find new weights"
        )
    return IN_MEMORY


@contextmanager
def locked_folder(accelerator: Accelerator, shared: Path) -> Iterator[Path]:
    """A new folder for all processes, which is removed in the end; the main one keeps a file in it
    locked. In memory nobody else may read it, as other users of a machine could; elsewhere the
    umask and the shared folder say who may.
    """
    lock = -1

    def make() -> Path:
        nonlocal lock
        name = f"fastp3o-weights-{socket.gethostname()}-{os.getpid()}.{secrets.token_hex(6)}"
        unlocked = shared / f".{name}"  # which nobody takes for abandoned
        unlocked.mkdir(0o700 if shared == IN_MEMORY else 0o777)
        try:
            lock = os.open(unlocked / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
            with suppress(OSError):  # a file system without locks: nobody removes it then
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return unlocked.rename(shared / name)
        except BaseException:
            shutil.rmtree(unlocked, ignore_errors=True)
            raise

    folder = on_main_process(accelerator, make)
    try:
        yield folder
    finally:
        if accelerator.is_main_process:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)


def remove_abandoned_weights(folder: Path) -> None:
    """Removes weights left behind by processes of this machine that were killed."""
    for path in folder.iterdir():
        name = NAME.fullmatch(path.name)
        if (
            name
            and name["host"] == socket.gethostname()
            and is_abandoned(path, int(name["process"]))
        ):
            shutil.rmtree(path, ignore_errors=True)


def is_abandoned(weights: Path, process: int) -> bool:
    """Whether no process holds the folder's lock. Earlier versions wrote no lock; then whether the
    process that wrote the folder has ended.
    """
    try:
        lock = os.open(weights / LOCK, os.O_RDWR)
    except FileNotFoundError:
        return not psutil.pid_exists(process)
    except OSError:  # another user's
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(lock)
    return True
