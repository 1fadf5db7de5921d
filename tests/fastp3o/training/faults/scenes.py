"""Tiny runs of each stage in the folder `run`, and whether one that was broken ends as an unbroken one."""

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelerate.state import AcceleratorState
from safetensors.torch import load_file

from fastp3o.objectives.online_dpo import OnlineDPOConfig
from fastp3o.objectives.p3o import P3OConfig
from fastp3o.objectives.ppo import PPOConfig
from fastp3o.stages import online, reward_model, sft
from fastp3o.stages.reward_model import RewardModelConfig
from fastp3o.stages.sft import SFTConfig
from tests.fastp3o import runs
from tests.fastp3o.training.faults.injection import in_child

COMMON = {"report_to": "none", "precision": "fp32", "learning_rate": 1e-2, "save_every": 2}
SUPERVISED = COMMON | {"max_response_tokens": 16, "epochs": 2, "batch_size": 4, "eval_every": 3}
ONLINE = COMMON | {"prompts": "prompts.jsonl", "reward": "rewards_for_tests:varied", "updates": 4, "samples_every": 0}
ONLINE |= {"prompts_per_update": 4, "prompts_per_minibatch": 2, "inner_epochs": 1, "max_response_tokens": 4}
ONLINE |= {"eval_prompts": "prompts.jsonl", "eval_limit": 2, "eval_every": 3}

SCENES: dict[str, tuple[Callable[[Any], None], type, dict[str, Any]]] = {
    "SFT": (sft.train, SFTConfig, SUPERVISED | {"train_data": "sft.jsonl", "eval_data": "sft.jsonl"}),
    "reward model": (
        reward_model.train,
        RewardModelConfig,
        SUPERVISED | {"train_data": "preferences.jsonl", "eval_data": "preferences.jsonl"},
    ),
    "P3O": (online.train, P3OConfig, ONLINE),
    "PPO": (online.train, PPOConfig, ONLINE),
    "online DPO": (online.train, OnlineDPOConfig, ONLINE),
    "bf16": (online.train, P3OConfig, ONLINE | {"precision": "bf16"}),
    "fp16": (online.train, P3OConfig, ONLINE | {"precision": "fp16"}),
    "LoRA": (online.train, P3OConfig, ONLINE | {"lora_rank": 2}),
    "top layer": (online.train, P3OConfig, ONLINE | {"trainable_layers": 1}),
    "K = 3, token clipping": (online.train, P3OConfig, ONLINE | {"responses_per_prompt": 3, "clipping": "token"}),
    "checkpointing, offload": (
        online.train,
        P3OConfig,
        ONLINE | {"gradient_checkpointing": True, "offload": True, "lr_schedule": "cosine"},
    ),
    "TensorBoard": (online.train, P3OConfig, ONLINE | {"report_to": "tensorboard"}),
}


@dataclass
class Scene:
    """A run, what it leaves unbroken, and where its processes log."""

    name: str
    model: str
    folder: Path

    def __post_init__(self) -> None:
        self.run, self.log = self.folder / "run", self.folder / "log.txt"
        status = in_child(lambda: self.train(), self.log)
        assert status == 0, self.log.read_text()
        self.expected = self.outcome()
        self.clear()

    def train(self, **changes: Any) -> None:
        AcceleratorState._reset_state(reset_partial_state=True)
        train, config, settings = SCENES[self.name]
        train(config(**(settings | {"model": self.model, "output_dir": "run"} | changes)))

    def resume(self) -> None:
        self.train(resume=True)

    def outcome(self) -> tuple[dict, list, list]:
        weights = load_file(self.run / "model" / "model.safetensors")
        return (
            {name: weight.float().numpy().tobytes() for name, weight in weights.items()},
            runs.metrics(str(self.run)),
            runs.metrics(str(self.run), "eval.jsonl"),
        )

    def clear(self) -> None:
        shutil.rmtree(self.run, ignore_errors=True)

    def states(self) -> list[str]:
        return sorted(os.listdir(self.run / "state")) if (self.run / "state").is_dir() else []

    def result(self) -> str:
        """What `--resume` makes of what is there: it must end with the bits, and the lines, of the unbroken run."""
        had_state = any(".unfinished-" not in name for name in self.states())
        status = in_child(self.resume, self.log)
        assert status == 0, f"cannot resume:\n{self.log.read_text()}"
        weights, metrics, evaluations = self.outcome()
        assert weights == self.expected[0], "other weights"
        assert (metrics, evaluations) == self.expected[1:], "other metrics"
        self.require_tidy()
        return "identical after `--resume`" if had_state else "identical, begun anew before the first state"

    def require_tidy(self) -> None:
        left = [
            str(path) for path in self.run.rglob("*.*-*") if ".unfinished-" in path.name or ".replaced-" in path.name
        ]
        assert not left, left
        assert len(self.states()) <= 2
