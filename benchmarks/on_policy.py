"""What P3O's on-policy way saves of a loss, forward and backward, on one CPU core: `python -m benchmarks.on_policy`.

Writes the least of interleaved rounds, in milliseconds of the thread's own processor time, to
results/on_policy.cpu.json. `tied`: the share of prompts whose rewards are equal, so that without a KL nothing of them
has a gradient.
"""

import json
import platform
import time
from pathlib import Path

import torch

from fastp3o_kernels import P3OSettings, linear_logprobs, linear_p3o_loss

RESULTS = Path(__file__).parent / "results" / "on_policy.cpu.json"
HIDDEN, VOCABULARY, LENGTH, ROUNDS = 256, 8192, 64, 15
CASES = {"K 2": (8, 2, 0.0), "K 2, half tied": (8, 2, 0.5), "K 4": (4, 4, 0.0)}


def measure(prompts: int, K: int, tied: float) -> dict[str, float]:
    torch.manual_seed(0)
    N = prompts * K * LENGTH
    hidden, weight = torch.randn(N, HIDDEN), torch.randn(VOCABULARY, HIDDEN) / HIDDEN**0.5
    labels, cu_seqlens = torch.randint(VOCABULARY, (N,)), torch.arange(0, N + 1, LENGTH)
    rewards = torch.randn(prompts, K)
    rewards[: int(prompts * tied)] = 0
    old = linear_logprobs(hidden, weight, labels).view(prompts, K, LENGTH).sum(-1)
    least: dict[str, float] = {}
    for _ in range(ROUNDS):
        for name, on_policy in (("other steps", False), ("on-policy", True)):
            leaves = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
            begin = time.thread_time()
            given = labels, cu_seqlens, old, old, rewards, P3OSettings(kl_coef=0.0)
            linear_p3o_loss(*leaves, *given, on_policy=on_policy).loss.backward()
            seconds = time.thread_time() - begin
            least[name] = min(least.get(name, seconds), seconds)
    return {name: round(1000 * seconds, 1) for name, seconds in least.items()}


if __name__ == "__main__":
    torch.set_num_threads(1)
    found = {name: measure(*case) for name, case in CASES.items()}
    about = {
        "torch": torch.__version__,
        "machine": platform.machine(),
        "unit": "ms of processor time, forward + backward",
    }
    RESULTS.write_text(json.dumps(about | {"cases": found}, indent=1) + "\n")
    print(RESULTS.read_text())
