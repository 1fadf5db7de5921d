"""One run of the plan -> one line of runs.jsonl."""

import hashlib
import json
import os
import shutil
import time
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState

from benchmarks.frontier.runs.plan import CLIPPINGS, Run
from benchmarks.frontier.tasks.offset_reward import OFFSETS, OffsetReward
from benchmarks.frontier.tasks.synthetic import read_jsonl
from benchmarks.frontier.tasks.task import SETTINGS, Task, load_scores
from fastp3o.objectives.config.base import OnlineConfig
from fastp3o.objectives.config.online import OBJECTIVES
from fastp3o.objectives.config.policy_gradient import PolicyGradientConfig
from fastp3o.run.names import EVALUATIONS
from fastp3o.sources import InMemory
from fastp3o.training.loop import train

# optimizer steps of an inner epoch
MINIBATCHES = 4
GOLD = "benchmarks.frontier.tasks.task:Task.gold"


def train_and_record(run: Run, task: Task, folder: Path) -> dict[str, Any]:
    """Trains in `folder`/run.name, where the finished model stays, and returns the run with its
    results.
    """
    # A killed command leaves the files of its runs, which runs of the next one must not meet.
    output = folder / f"{run.name}.{os.getpid()}"
    log_file = folder / f"{run.name}.{os.getpid()}.log.txt"
    folder.mkdir(parents=True, exist_ok=True)
    # Runs of one process must not share what accelerate keeps.
    AcceleratorState._reset_state(reset_partial_state=True)
    started = time.perf_counter()
    with log_file.open("w") as log, redirect_stdout(log), redirect_stderr(log):
        config = replace(
            configuration(run, task, output),
            reward=InMemory(task.reward_model, offset_reward(run, task)),
            gold_reward=InMemory(GOLD, task.gold_reward()),
        )
        train(config)
    shutil.rmtree(output / "state")
    log_file.rename(output / "log.txt")
    finished = folder / run.name
    shutil.rmtree(finished, ignore_errors=True)
    output.rename(finished)
    return asdict(run) | {
        "seconds": round(time.perf_counter() - started, 1),
        "threads": torch.get_num_threads(),
        "sha256": hashlib.sha256(
            (finished / "model" / "model.safetensors").read_bytes()
        ).hexdigest(),
        "evaluations": rounded_evaluations(finished),
    }


def offset_reward(run: Run, task: Task) -> OffsetReward:
    reward = load_scores(task.reward_model, task.policy)
    centred = run.algorithm == CENTRED
    evaluated = read_jsonl(Path(task.eval_prompts)) if centred or run.reward_spread else ()
    return OffsetReward(
        reward,
        task.reward_mean,
        task.reward_std,
        offset=OFFSETS[run.offset],
        sd=run.offset_sd,
        factor=run.reward_factor,
        spread=run.reward_spread,
        centred=centred,
        plain=frozenset(record["prompt"] for record in evaluated),
    )


def configuration(run: Run, task: Task, output: Path) -> OnlineConfig:
    settings = (
        SETTINGS
        | {
            "model": task.policy,
            "reference": task.policy,  # which evaluations measure the KL to, whether the loss has one or not
            "reward": task.reward_model,
            "gold_reward": GOLD,
            "prompts": task.prompts,
            "eval_prompts": task.eval_prompts,
            "output_dir": str(output),
            "learning_rate": run.learning_rate,
            "kl_per_update": run.kl_per_update or None,
            "kl_coef": run.kl_coef,
            "seed": run.seed,
            "responses_per_prompt": run.responses_per_prompt,
            "prompts_per_update": run.prompts_per_update,
            # The number of optimizer steps does not depend on that of prompts.
            "prompts_per_minibatch": max(1, run.prompts_per_update // MINIBATCHES),
            "rounds_ahead": run.rounds_ahead,
            "precision": "fp32",
            "report_to": "none",
            "samples_every": 0,
            "log_rollouts": 0,
        }
    )
    if run.updates:
        settings |= {"updates": run.updates, "eval_at": ""}
    objective, own_settings = OWN_SETTINGS.get(run.algorithm, (run.algorithm, {}))
    own_settings = own_settings | correction(run.correction, run.algorithm)
    if run.inner_epochs:
        own_settings = own_settings | {"inner_epochs": run.inner_epochs}
    if run.critic_learning_rate:
        own_settings = own_settings | {"critic_learning_rate": run.critic_learning_rate}
    if run.value_clip_range:
        own_settings = own_settings | {"value_clip_range": run.value_clip_range}
    if run.own_parameter:
        own_settings = own_settings | dict.fromkeys(OWN_PARAMETERS[objective], run.own_parameter)
    if issubclass(OBJECTIVES[objective], PolicyGradientConfig):
        settings |= {"reward_scaling": "none", "reward_clip": 0.0}
    return OBJECTIVES[objective](**(settings | own_settings))


# Rewards already have unit deviation; a running deviation would divide PPO's by that of the offset.
# Values must be free to reach an offset of tens.
PPO_SETTINGS = {
    "reward_scaling": "none",
    "reward_clip": 0.0,
    "value_clip_range": 10.0,
    "critic_learning_rate": 2e-3,
}

CENTRED = "ppo_centred"  # PPO with rewards less the mean of their prompt's

# Algorithm -> its objective's name, if that differs, and its own settings. RLOO's loss is on-policy
# only in the first steps, so RLOO makes one pass, as by default.
OWN_SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    **{
        name: ("p3o", {"clipping": name, "reward_scaling": "none"})
        for name in (*CLIPPINGS, "token")
    },
    "ppo": ("ppo", PPO_SETTINGS),
    CENTRED: ("ppo", PPO_SETTINGS),
    "ppo-lambda-1": ("ppo", PPO_SETTINGS | {"gae_lambda": 1.0}),
    "dpo": ("online_dpo", {}),
    "rloo": ("rloo", {"inner_epochs": 1}),
    **{f"rloo-{clipping}": ("rloo", {"clipping": clipping}) for clipping in ("response", "token")},
    **{name: (name, {"kl_estimator": "k3"}) for name in ("grpo", "dr_grpo", "dapo")},
    **{f"{name}-k1": (name, {"kl_estimator": "k1"}) for name in ("grpo", "dr_grpo", "dapo")},
    "gspo": ("gspo", {"kl_estimator": "k1"}),
    "oapl": ("oapl", {"old_logprobs": "policy"}),
}

# Objective -> the fields of its configuration that Run.own_parameter sets.
OWN_PARAMETERS = {
    **dict.fromkeys(("p3o", "ppo"), ("clip_range",)),
    **dict.fromkeys(("grpo", "gspo"), ("clip_low", "clip_high")),
    "rebel": ("eta",),
    "oapl": ("beta2",),
}


# Losses of tokens are weighed by the ratios of tokens, whose usual cap is 2 (Yao et al. 2025);
# others by those of whole responses or pairs, whose cap is that of P3O's ratios.
WEIGHTS_OF_TOKENS = ("ppo", "grpo", "grpo-k1", "dr_grpo", "dapo", "rloo-token")
TOKEN_CAP, RESPONSE_CAP = 2.0, 10.0


def correction(name: str, algorithm: str) -> dict[str, Any]:
    """Settings that correct for rollouts of an older policy. none: ratios compare with the policy
    before the update, as if it had sampled. ratios: they compare with the policy that sampled.
    weights: as none, and losses are weighed by the ratio of the two, capped.
    """
    settings: dict[str, dict[str, Any]] = {
        "none": {},
        "ratios": {"old_logprobs": "sampler"},
        "weights": {
            "sampler_ratio_cap": TOKEN_CAP if algorithm in WEIGHTS_OF_TOKENS else RESPONSE_CAP
        },
    }
    return settings[name]


def rounded_evaluations(folder: Path) -> list[dict[str, float]]:
    """The run's evaluations, rounded to six significant digits, which is finer than their standard
    errors.
    """
    lines = (folder / EVALUATIONS).read_text().splitlines()
    return [
        {name: float(f"{value:.6g}") for name, value in json.loads(line).items()} for line in lines
    ]
