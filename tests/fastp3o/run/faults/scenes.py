"""Tiny runs of each stage in the folder `run`, and whether one that was broken ends as an unbroken
one.
"""

import os
import shutil
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelerate.state import AcceleratorState
from numpy import frombuffer
from safetensors.torch import load_file

from fastp3o.objectives.config.p3o import P3OConfig
from fastp3o.objectives.config.ppo import PPOConfig
from fastp3o.objectives.config.preferences import DPOConfig, KTOConfig, OnlineDPOConfig, SimPOConfig
from fastp3o.run import log
from fastp3o.script import run_script
from fastp3o.training import loop as online
from fastp3o.training import preferences, reward_model, sft
from fastp3o.training.reward_model import RewardModelConfig
from fastp3o.training.sft import SFTConfig
from tests.fastp3o import runs
from tests.fastp3o.run.faults.injection import FileCalls, fork, fork_together, wait_together

COMMON = {"report_to": "none", "precision": "fp32", "learning_rate": 1e-2, "save_every": 2}
SUPERVISED = COMMON | {"max_response_tokens": 16, "epochs": 2, "batch_size": 4, "eval_every": 3}
SUPERVISED |= {"lr_schedule": "cosine"}
DEMONSTRATIONS = SUPERVISED | {"train_data": "sft.jsonl", "eval_data": "sft.jsonl"}
PAIRS = SUPERVISED | {"train_data": "preferences.jsonl", "eval_data": "preferences.jsonl"}
SINGLE = SUPERVISED | {
    "train_data": "unpaired.jsonl",
    "eval_data": "unpaired.jsonl",
    "batch_size": 8,
}
DROPOUT = {"lora_rank": 2, "lora_dropout": 0.5, "gradient_checkpointing": True}
ONLINE = COMMON | {
    "prompts": "prompts.jsonl",
    "reward": "rewards_for_tests:varied",
    "updates": 4,
    "samples_every": 0,
}
ONLINE |= {
    "prompts_per_update": 4,
    "prompts_per_minibatch": 2,
    "inner_epochs": 1,
    "max_response_tokens": 4,
}
ONLINE |= {"eval_prompts": "prompts.jsonl", "eval_limit": 2, "eval_every": 3}
AHEAD = ONLINE | {"rounds_ahead": 2, "updates": 5}
SPARING = {"gradient_checkpointing": True, "offload": True, "lr_schedule": "cosine"}

SCENES: dict[str, tuple[Callable[[Any], None], type, dict[str, Any]]] = {
    "SFT": (sft.train, SFTConfig, DEMONSTRATIONS),
    "SFT in fp16": (sft.train, SFTConfig, DEMONSTRATIONS | {"precision": "fp16"}),
    "dropout": (sft.train, SFTConfig, DEMONSTRATIONS | DROPOUT),
    "reward model": (reward_model.train, RewardModelConfig, PAIRS),
    "reward model, LoRA": (
        reward_model.train,
        RewardModelConfig,
        PAIRS | {"lora_rank": 2, "centring": 0.1},
    ),
    "DPO": (preferences.train, DPOConfig, PAIRS),
    "KTO, LoRA": (preferences.train, KTOConfig, SINGLE | {"lora_rank": 2}),
    "SimPO": (preferences.train, SimPOConfig, PAIRS),
    "P3O": (online.train, P3OConfig, ONLINE),
    "PPO": (online.train, PPOConfig, ONLINE),
    "online DPO": (online.train, OnlineDPOConfig, ONLINE),
    "bf16": (online.train, P3OConfig, ONLINE | {"precision": "bf16"}),
    "fp16": (online.train, P3OConfig, ONLINE | {"precision": "fp16"}),
    "LoRA": (online.train, P3OConfig, ONLINE | {"lora_rank": 2}),
    "top layer": (online.train, P3OConfig, ONLINE | {"trainable_layers": 1}),
    "K = 3, token clipping": (
        online.train,
        P3OConfig,
        ONLINE | {"responses_per_prompt": 3, "clipping": "token"},
    ),
    "checkpointing, offload": (online.train, P3OConfig, ONLINE | SPARING),
    "TensorBoard": (online.train, P3OConfig, ONLINE | {"report_to": "tensorboard"}),
    "rounds ahead": (online.train, P3OConfig, AHEAD),
    "rounds ahead, sampler's ratios": (
        online.train,
        P3OConfig,
        AHEAD | {"old_logprobs": "sampler"},
    ),
}

# How often each result came of a fault, for the table at the end of the session.
COUNTS: dict[str, Counter[str]] = defaultdict(Counter)
# How long the run of a scene takes, its file-system calls and what it leaves, wherever its folder
# is.
UNBROKEN: dict[tuple[str, int], tuple[float, list[int], tuple[dict, list, list, list]]] = {}


@dataclass
class Scene:
    """A run, what it leaves unbroken, how long it takes and each process's calls, and where its
    processes log. Two processes have a part of the model each, its own log, and errors told as
    scripts tell them.
    """

    name: str
    model: str
    folder: Path
    processes: int = 1

    def __post_init__(self) -> None:
        self.run = self.folder / "run"
        self.logs = [self.folder / f"log-{number}.txt" for number in range(self.processes)]
        unbroken = UNBROKEN.get((self.name, self.processes))
        if not unbroken:
            started = time.monotonic()
            calls = self.count_calls(self.train)
            unbroken = (time.monotonic() - started, calls, self.outcome())
            UNBROKEN[self.name, self.processes] = unbroken
            self.clear()
        self.seconds, self.calls, self.expected = unbroken

    def start(
        self, work: Callable[[], object], prepare: Callable[[int], object] = lambda number: None
    ) -> list[int]:
        """The ids of the processes that do it; `prepare` has the number of each."""
        if self.processes == 1:
            return [fork(work, self.logs[0], lambda: prepare(0))]
        return fork_together(lambda: run_script(work), self.logs, prepare)

    def do(
        self, work: Callable[[], object], prepare: Callable[[int], object] = lambda number: None
    ) -> list[int]:
        """Their exit statuses."""
        return wait_together(self.start(work, prepare))

    def do_with_fault(
        self, work: Callable[[], object], process: int = 0, **fault: int
    ) -> list[int]:
        """The exit statuses where one process meets a fault of `FileCalls`."""
        calls = FileCalls(self.run, **fault)
        return self.do(work, lambda number: calls.install() if number == process else None)

    def count_calls(self, work: Callable[[], object]) -> list[int]:
        """Each process's file-system calls in the run's folder during `work`."""
        calls = FileCalls(self.run)

        def work_and_tell() -> None:
            work()
            (self.folder / f"calls-{os.environ.get('RANK', 0)}.txt").write_text(str(calls.count))

        assert not any(self.do(work_and_tell, lambda number: calls.install())), self.told()
        return [int(path.read_text()) for path in sorted(self.folder.glob("calls-*.txt"))]

    def told(self) -> str:
        return "\n".join(log.read_text() for log in self.logs)

    def train(self, **changes: Any) -> None:
        AcceleratorState._reset_state(reset_partial_state=True)
        train, config, settings = SCENES[self.name]
        train(config(**(settings | {"model": self.model, "output_dir": "run"} | changes)))

    def resume(self) -> None:
        self.train(resume=True)

    def outcome(self) -> tuple[dict, list, list, list]:
        weights = load_file(self.run / "model" / "model.safetensors")
        return (
            {name: weight.float().numpy().tobytes() for name, weight in weights.items()},
            runs.metrics(str(self.run)),
            runs.metrics(str(self.run), "eval.jsonl"),
            [*log.read(self.run / "rollouts.jsonl")],
        )

    def clear(self) -> None:
        shutil.rmtree(self.run, ignore_errors=True)

    def states(self) -> list[str]:
        return sorted(os.listdir(self.run / "state")) if (self.run / "state").is_dir() else []

    def stopped_with_a_state(self, process: int = 0, part: float = 0.5) -> Path:
        """A run of which a process was killed after this part of its calls, moved away; to be
        copied.
        """
        self.clear()
        self.do_with_fault(self.train, process, kill_before=int(part * self.calls[process]))
        assert self.states()
        stopped = self.folder / "stopped"
        shutil.rmtree(stopped, ignore_errors=True)
        self.run.rename(stopped)
        return stopped

    def result(self, fault: str, told: str = "") -> str:
        """Resumes: the run must end with the bits and lines of the unbroken run. What came of the
        fault is counted.
        """
        had_state = any(".unfinished-" not in name for name in self.states())
        assert not any(self.do(self.resume)), f"cannot resume:\n{self.told()}"
        weights, *logs, rollouts = self.outcome()
        assert weights == self.expected[0], "other weights"
        assert logs == [*self.expected[1:3]], "other metrics"
        assert rollouts == self.expected[3], "other rollouts"
        left = [
            path
            for path in self.run.rglob("*.*-*")
            if ".unfinished-" in path.name or ".replaced-" in path.name
        ]
        assert not left, left
        assert len(self.states()) <= 2
        result = (
            "identical after `--resume`"
            if had_state
            else "identical, begun anew before the first state"
        )
        COUNTS[fault][told + result] += 1
        return result

    def furthest_alone(self) -> float:
        """The largest difference of a weight where one process goes on with what is there, in
        another order of sums.
        """
        assert not any(wait_together([fork(self.resume, self.logs[0])])), self.told()
        expected, *_ = self.expected
        weights, metrics, *_ = self.outcome()
        assert [line["step"] for line in metrics] == [line["step"] for line in self.expected[1]]
        return max(
            abs(frombuffer(weights[n], "f4") - frombuffer(expected[n], "f4")).max()
            for n in expected
        )
