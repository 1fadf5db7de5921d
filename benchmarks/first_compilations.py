"""Times the compilations that the first iteration of a run waits for: with an empty cache, and with a full one. No GPU.

    python -m benchmarks.first_compilations

A run is online training of an fp16 model with heads of 128, two responses to a prompt, its own engine, P3O or another
objective with an entropy. Each further objective, vocabulary or number of responses adds a line or two of these.
"""

import json
import os
import subprocess
import sys
import tempfile
import time

from benchmarks import compile_kernels

V = 128256
RUN = {
    "logprobs_kernel": ("fp32",),
    "statistics_kernel": ("fp32",),
    "dlogits_kernel": ("fp32 to fp16", "fp32 to fp16, entropy"),
    "pair_kernel": ("joint, kl current, K 2",),
    "results_kernel": ("",),
    "sequence_sums_kernel": ("",),
    "scale_kernel": ("fp16",),
    "lowered_scale_kernel": ("",),
    "partial_attention_kernel": ("fp16, D 128, K 4, G 4",),
    "merge_kernel": ("bf16, D 128",),
    "race_kernel": ("",),
}


def seconds() -> dict[str, float]:
    """By kernel and settings, compiled one after the other in this process."""
    taken = {}
    for config in compile_kernels.configurations((V,)):
        if config.name.removesuffix(f"V {V}").removesuffix(", ") in RUN[config.kernel]:
            begin = time.perf_counter()
            compile_kernels.compile_for(config, 90)
            taken[f"{config.kernel} {config.name}"] = time.perf_counter() - begin
    return taken


def main() -> None:
    with tempfile.TemporaryDirectory() as cache:
        command = [sys.executable, "-m", "benchmarks.first_compilations", "--here"]
        environment = os.environ | {"TRITON_CACHE_DIR": cache}
        empty, full = (
            json.loads(subprocess.run(command, env=environment, capture_output=True, check=True).stdout)
            for _ in range(2)
        )
    for name, cold in empty.items():
        print(f"{cold:6.2f} s  {full[name]:6.3f} s  {name}")
    print(f"{sum(empty.values()):6.2f} s  {sum(full.values()):6.3f} s  {len(empty)} kernels")


if __name__ == "__main__":
    print(json.dumps(seconds())) if "--here" in sys.argv else main()
