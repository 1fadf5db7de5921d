"""Compiles every kernel at a few settings, reads its code, and predicts its time next to a copy. No GPU.

python -m benchmarks.read_kernels            # results/sass.json and the table in NOTES.md
"""

import argparse
import json
import math
import os
import tempfile
from collections import Counter
from pathlib import Path

from benchmarks import compile_kernels
from benchmarks.compile_kernels import ARCHITECTURES, Configuration, disassembled, identity
from benchmarks.sass import ASYNCHRONOUS, FP32, H100, H200, TENSOR_CORES, blocks_per_processor, main_loop

FOLDER = Path(__file__).parent
RESULT, NOTES = FOLDER / "results" / "sass.json", FOLDER / "NOTES.md"
V = 128256
# Of each kernel the settings that training and sampling choose most, and those with the most work for each byte.
READ = {
    "logprobs_kernel": ("bf16", "fp32", "fp32, softcap"),
    "statistics_kernel": ("bf16", "fp32", "fp32, softcap"),
    "dlogits_kernel": ("bf16 to bf16", "fp32 to bf16", "bf16 to bf16, entropy", "fp32 to bf16, softcap, entropy"),
    "race_kernel": ("",),
    "pair_kernel": ("joint, kl current, K 2", "token, kl current, K 2", "separate, kl current, K 9, valid"),
    "results_kernel": ("",),
    "sequence_sums_kernel": ("",),
    "scale_kernel": ("fp16", "fp32"),
    "lowered_scale_kernel": ("",),
    "partial_attention_kernel": (
        "bf16, D 128, K 1, G 1, window, softcap",
        "bf16, D 128, K 4, G 4, window, softcap",
        "bf16, D 64, K 4, G 8, window, softcap",
        "bf16, D 256, K 4, G 4, window, softcap",
        "fp16, D 128, K 4, G 4",
        "fp32, D 128, K 8, G 8, window, softcap",
    ),
    "merge_kernel": ("bf16, D 128",),
}
ROWS = ("logprobs_kernel", "statistics_kernel", "dlogits_kernel")
# Too little memory to stream: launches and latency are all that counts.
LATENCY = ("pair_kernel", "results_kernel", "sequence_sums_kernel", "merge_kernel", "lowered_scale_kernel")
BEGIN, END = "<!-- read from compiled code: begin -->", "<!-- read from compiled code: end -->"


def chosen() -> list[Configuration]:
    def wanted(config: Configuration) -> bool:
        name = ", ".join(part for part in config.name.split(", ") if part != f"V {V}")
        return name in READ[config.kernel]

    found = [config for config in compile_kernels.configurations((V,)) if wanted(config)]
    assert Counter(config.kernel for config in found) == {kernel: len(names) for kernel, names in READ.items()}
    return found


def elements(config: Configuration) -> int:
    """That a thread takes in a step of the loop: logits, values, or elements of keys and of values."""
    constants = dict(config.constants)
    extents = {
        "race_kernel": ("B", "BLOCKS_AT_ONCE"),
        "scale_kernel": ("BLOCK",),
        "partial_attention_kernel": ("BLOCK_N", "BLOCK_D"),
    }.get(config.kernel, ("BLOCK_V",))
    number = math.prod(constants.get(extent, 1) for extent in extents)
    return number * (2 if config.kernel == "partial_attention_kernel" else 1) // (32 * config.warps)


def reading(config: Configuration, architecture: int) -> dict[str, object]:
    """What one kernel takes; of a step of its loop the accesses and the instructions of a thread."""
    code = disassembled(config, architecture)
    loop = main_loop(code.sass)
    return {
        **identity(config, architecture, code),
        "shared": code.shared,
        "blocks": blocks_per_processor(f"sm_{architecture}", config.warps, code.registers, code.shared),
        "layouts": sorted(set(code.layouts)),
        "elements": elements(config),
        "repeats": loop.repeats,
        "loads": {str(width): number for width, number in sorted(loop.loads.items())},
        "stores": {str(width): number for width, number in sorted(loop.stores.items())},
        "asynchronous": loop.number(*ASYNCHRONOUS),
        "tensor_core": loop.number(*TENSOR_CORES),
        "instructions": loop.opcodes.total(),
        "fp32": loop.number(*FP32),
        "special": loop.number("MUFU"),
        "clocks_per_byte": {unit: round(clocks, 5) for unit, clocks in loop.clocks_per_byte().items()},
    }


def busiest(entry: dict) -> str:
    """The busiest unit, and its time beside a copy at the bandwidth of each device."""
    unit, clocks = max(entry["clocks_per_byte"].items(), key=lambda item: item[1])
    parts = [f"{clocks * device.copy_per_clock:.0%}" for device in (H100, H200)]
    return f"{' / '.join(parts)} ({unit})"


def widths(accesses: dict[str, int]) -> str:
    return " + ".join(f"{number} × {8 * int(width)}" for width, number in reversed(accesses.items())) or "–"


def table(entries: list[dict]) -> str:
    """The kernels as they are on sm_90, in Markdown."""
    lines = [
        "| kernel | settings | warps; registers; blocks a processor | loads; stores (bits) | instructions, fp32, "
        "special functions an element | busiest unit beside a copy, H100 / H200 |",
        "|---|---|---|---|---|---|",
    ]
    for entry in entries:
        if entry["architecture"] != "sm_90":
            continue
        name = entry["configuration"].removesuffix(f"V {V}").removesuffix(", ")
        takes = f"{entry['warps']}; {entry['registers']}; {entry['blocks']}"
        access = f"{widths(entry['loads'])}; {widths(entry['stores'])}"
        counts, time = "–", "latency"
        if entry["kernel"] not in LATENCY:
            counts = ", ".join(
                f"{entry[count] / entry['elements']:.1f}" for count in ("instructions", "fp32", "special")
            )
            time = busiest(entry)
        lines.append(f"| `{entry['kernel']}` | {name} | {takes} | {access} | {counts} | {time} |")
    return "\n".join(lines)


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TRITON_CACHE_DIR"] = cache
        entries = [reading(config, architecture) for architecture in ARCHITECTURES for config in chosen()]
    lines = ",\n".join(json.dumps(entry) for entry in entries)
    record = {"triton": compile_kernels.triton.__version__, "sources": compile_kernels.sources()}
    RESULT.write_text(json.dumps(record)[:-1] + f', "kernels": [\n{lines}\n]}}\n')
    before, rest = NOTES.read_text().split(BEGIN)
    NOTES.write_text(f"{before}{BEGIN}\n{table(entries)}\n{END}{rest.split(END)[1]}")


if __name__ == "__main__":
    main()
