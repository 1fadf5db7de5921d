"""Rollouts from a vLLM server beside our engine and transformers: tokens a second, and seconds for
new weights.

    python -m benchmarks.served --url http://127.0.0.1:8000 --server_pid PID --model MODEL --eval_prompts EVAL.jsonl

The server has MODEL and fp32. Writes benchmarks/results/served.json, of which `python -m
benchmarks.report` prints the table.
"""

import argparse
import json
import os
import time
from pathlib import Path
from timeit import timeit

import torch
from accelerate import Accelerator

from benchmarks.environment import environment
from fastp3o.config import SamplerConfig
from fastp3o.data.loading import load_prompts
from fastp3o.models.loading import load_policy
from fastp3o.models.tokenizer import load_tokenizer
from fastp3o.objectives.config.p3o import P3OConfig
from fastp3o.rollouts.engine_sampler import named_sampler
from fastp3o.rollouts.groups import Sampler, make_prompts
from fastp3o.rollouts.vllm.publisher import Publisher
from fastp3o.rollouts.vllm.sampler import VLLMSampler
from fastp3o.runtime.context import Context
from fastp3o.runtime.precision import choose_precision

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "served.json"
RESPONSE, PROMPT = 32, 192  # tokens at most


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in ("url", "model", "eval_prompts"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument(
        "--server_pid",
        type=int,
        required=True,
        help="Whose processor time counts, with its children's.",
    )
    given = parser.parse_args()
    torch.set_num_threads(1)
    # The load is that of others, as the measurement begins.
    machine = {
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "torch": torch.__version__,
        "threads": 1,
    }
    record = {"environment": environment(), "machine": machine, "speed": speed(given)}
    RESULTS.write_text(json.dumps(record, indent=1) + "\n")


def speed(
    given: argparse.Namespace, prompts: int = 64, responses: int = 8, rounds: int = 3
) -> dict:
    """Tokens a second of each sampler, in turns, by the clock and by processor time, the server's
    included.
    """
    tokenizer, policy = load_tokenizer(given.model), load_policy(given.model)
    examples, _ = load_prompts(
        given.eval_prompts, tokenizer, limit=prompts, max_prompt_tokens=PROMPT
    )
    asked = make_prompts(examples[:])
    samplers: dict[str, Sampler] = {
        config.sampler: named_sampler(
            config, policy, tokenizer, max_response_tokens=RESPONSE, batch_size=prompts
        )
        for config in (SamplerConfig(sampler="engine"), SamplerConfig(sampler="transformers"))
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
    publisher = Publisher(context, config, policy, lambda: next(versions))
    publish_seconds = [timeit(publisher, number=1) for _ in range(4)][1:]
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
                totals[name] = [
                    total + more for total, more in zip(totals[name], (tokens, *spent), strict=True)
                ]
    return {
        "parameters": sum(parameter.numel() for parameter in policy.parameters()),
        "prompts": prompts,
        "responses": responses,
        "longest": RESPONSE,
        "publish_seconds": sum(publish_seconds) / len(publish_seconds),
        "tokens_per_second": {name: tokens / clock for name, (tokens, clock, _) in totals.items()},
        "tokens_per_processor_second": {
            name: tokens / processor for name, (tokens, _, processor) in totals.items()
        },
    }


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


if __name__ == "__main__":
    main()
