"""Rollouts from a vLLM server beside our engine and transformers: speed, new weights, whole runs.

    python -m benchmarks.served --url http://127.0.0.1:8000 --server_pid PID --model MODEL --reward REWARD_MODEL \\
        --prompts TRAIN.jsonl --eval_prompts EVAL.jsonl

The server has MODEL and the run's precision. Runs are `scripts/p3o.py`'s, each in a process of its own. Writes
benchmarks/results/served.json, of which `python -m benchmarks.report` prints the tables.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from accelerate import Accelerator

from fastp3o.config import SamplerConfig
from fastp3o.context import Context
from fastp3o.data.loading import load_prompts
from fastp3o.models.loading import load_policy, load_tokenizer
from fastp3o.objectives.p3o import P3OConfig
from fastp3o.precision import choose_precision
from fastp3o.rollouts.engine_sampler import named_sampler
from fastp3o.rollouts.groups import make_prompts
from fastp3o.rollouts.sampler import Sampler
from fastp3o.rollouts.vllm.publisher import Publisher
from fastp3o.rollouts.vllm.sampler import VLLMSampler

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "served.json"
RESPONSE, PROMPT = 32, 192  # tokens at most
# The flags of each way, beside those that all have.
WAYS = {
    "engine": [],
    "vLLM": ["--sampler", "vllm"],
    "vLLM, one round ahead": ["--sampler", "vllm", "--rounds_ahead", "1"],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("url", "model", "reward", "prompts", "eval_prompts"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument(
        "--server_pid", type=int, required=True, help="Its processor time is counted, with its children's."
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--updates", type=int, default=6)
    given = parser.parse_args()
    torch.set_num_threads(1)
    record = {"machine": machine(), "speed": speed(given), "runs": []}
    for seed in range(given.seeds):
        for way, flags in WAYS.items():
            record["runs"].append({"way": way, "seed": seed, **run(given, flags, seed)})
            print(way, seed, record["runs"][-1]["evaluations"][-1], flush=True)
            RESULTS.write_text(json.dumps(record, indent=1) + "\n")


def machine() -> dict:
    """The machine; `load` is that of others, as the measurement begins."""
    return {"cores": os.cpu_count(), "load": os.getloadavg()[0], "torch": torch.__version__, "threads": 1}


def speed(given: argparse.Namespace, prompts: int = 64, responses: int = 8, rounds: int = 3) -> dict:
    """Tokens a second of each sampler, in turns, by the clock and by processor time, the server's included."""
    tokenizer, policy = load_tokenizer(given.model), load_policy(given.model)
    examples, _ = load_prompts(given.eval_prompts, tokenizer, limit=prompts, max_prompt_tokens=PROMPT)
    asked = make_prompts(examples[:])
    common = {"max_response_tokens": RESPONSE, "batch_size": prompts}
    samplers: dict[str, Sampler] = {
        name: named_sampler(SamplerConfig(sampler=name), policy, tokenizer, **common)
        for name in ("engine", "transformers")
    }
    context = Context(Accelerator(cpu=True), choose_precision("fp32", "fp32"), tokenizer, None)
    versions = iter(range(100))
    config = P3OConfig(
        model=given.model,
        output_dir="",
        prompts="",
        reward="",
        sampler="vllm",
        vllm_url=given.url,
        max_prompt_tokens=PROMPT,
    )
    publisher = Publisher(context, config, config.longest_sequence, policy, lambda: next(versions))
    publish_seconds = list(timed(publisher, times=4))[1:]
    publisher.version = lambda: publisher.published or 0
    samplers["vLLM"] = VLLMSampler(publisher, tokenizer, max_response_tokens=RESPONSE)
    totals = {name: [0, 0.0, 0.0] for name in samplers}
    for turn in range(-1, rounds):  # the first is not counted
        for name, sampler in samplers.items():
            clock, processor = time.perf_counter(), processor_seconds(given.server_pid)
            groups = sampler(asked, responses, 1000 + turn)
            spent = time.perf_counter() - clock, processor_seconds(given.server_pid) - processor
            tokens = sum(len(response.ids) for group in groups for response in group.responses)
            if turn >= 0:
                totals[name] = [total + more for total, more in zip(totals[name], (tokens, *spent), strict=True)]
    return {
        "parameters": sum(parameter.numel() for parameter in policy.parameters()),
        "prompts": prompts,
        "responses": responses,
        "longest": RESPONSE,
        "publish_seconds": sum(publish_seconds) / len(publish_seconds),
        "tokens_per_second": {name: tokens / clock for name, (tokens, clock, _) in totals.items()},
        "tokens_per_processor_second": {name: tokens / processor for name, (tokens, _, processor) in totals.items()},
    }


def timed(publish: Callable[[], None], times: int) -> Iterator[float]:
    for _ in range(times):
        begin = time.perf_counter()
        publish()
        yield time.perf_counter() - begin


def processor_seconds(server: int) -> float:
    """Of this process, the server and the server's children."""
    ticks = os.sysconf("SC_CLK_TCK")
    total = time.process_time()
    waiting = [server]
    while waiting:
        pid = waiting.pop()
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        total += (int(fields[11]) + int(fields[12])) / ticks
        for task in Path(f"/proc/{pid}/task").iterdir():
            waiting += map(int, (task / "children").read_text().split())
    return total


def run(given: argparse.Namespace, flags: list[str], seed: int) -> dict:
    """Evaluations and steps of a run of P3O."""
    served = ["--vllm_url", given.url] if flags else []
    with tempfile.TemporaryDirectory() as folder:
        common = {
            "model": given.model,
            "reward": given.reward,
            "prompts": given.prompts,
            "eval_prompts": given.eval_prompts,
            "output_dir": f"{folder}/run",
            "eval_limit": 96,
            "updates": given.updates,
            "prompts_per_update": 32,
            "prompts_per_minibatch": 16,
            "inner_epochs": 2,
            "max_prompt_tokens": PROMPT,
            "max_response_tokens": RESPONSE,
            "tokens_per_row": 2048,
            "missing_eos_penalty": 1,
            "learning_rate": 3e-4,
            "kl_coef": 0.05,
            "samples_every": 0,
            "report_to": "none",
            "seed": seed,
        }
        arguments = [part for name, value in common.items() for part in (f"--{name}", str(value))]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        command = [sys.executable, str(ROOT / "scripts" / "p3o.py"), *arguments, *flags, *served]
        subprocess.run(command, check=True, capture_output=True, env=environment)
        steps, evaluations = (
            [json.loads(line) for line in Path(folder, "run", name).read_text().splitlines()]
            for name in ("metrics.jsonl", "eval.jsonl")
        )
    kept = ("step", "reward", "kl", "sampler_gap", "staleness", "seconds")
    return {
        "evaluations": [{name: line[name] for name in ("step", "reward", "kl")} for line in evaluations],
        "steps": [{key: line[key] for key in line if key.startswith(kept)} for line in steps],
    }


if __name__ == "__main__":
    main()
