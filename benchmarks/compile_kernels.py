"""Compiles every kernel ahead of time, in every configuration that it can choose, and reports what
it takes. No GPU.

    python benchmarks/compile_kernels.py                     # a table; exits with 1 where spills are not negligible
    python benchmarks/compile_kernels.py --output table.json

Architectures: sm_80 (A100), sm_86 (RTX 30), sm_89 (RTX 40, L40), sm_90 (H100, H200), sm_100 (B200),
sm_120 (RTX 50). Vocabularies: GPT-2's, an odd one, and those of the heads in `shapes.py`. Of decode
attention D is the size of a head, K responses to a prompt, G heads to one of keys.
"""

import os
import sys

# Triton reads these when it is first imported. A cache of earlier runs would hide a kernel that no
# longer compiles.
os.environ["TRITON_INTERPRET"] = "0"

import argparse
import hashlib
import json
import re
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import TypedDict, get_args, get_type_hints

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel

import fastp3o_kernels
from fastp3o_kernels.decoding import (
    attention_kernel,
    sampling,
    sampling_kernel,
    slots_kernel,
    top_p_kernel,
)
from fastp3o_kernels.head import backward, scale_kernel
from fastp3o_kernels.layers import ACTIVATIONS, gate_kernel, norm_kernel, rotary_kernel
from fastp3o_kernels.p3o import pair_kernel
from fastp3o_kernels.p3o.settings import P3OSettings
from fastp3o_kernels.rows import exponentials_kernel, logits_kernel, sequence_kernel
from fastp3o_kernels.rows.rows import ALIGNMENT

# The file of each kernel.
KERNELS = {
    "logprobs_kernel": logits_kernel,
    "dlogits_kernel": logits_kernel,
    "statistics_kernel": logits_kernel,
    "bias_gradient_kernel": logits_kernel,
    "exponentials_kernel": exponentials_kernel,
    "pair_kernel": pair_kernel,
    "results_kernel": pair_kernel,
    "sequence_sums_kernel": sequence_kernel,
    "scale_kernel": scale_kernel,
    "lowered_scale_kernel": scale_kernel,
    "partial_attention_kernel": attention_kernel,
    "merge_kernel": attention_kernel,
    "members_kernel": slots_kernel,
    "take_kernel": slots_kernel,
    "race_kernel": sampling_kernel,
    "top_p_kernel": top_p_kernel,
    "rms_norm_kernel": norm_kernel,
    "rms_norm_gradient_kernel": norm_kernel,
    "weight_gradient_kernel": norm_kernel,
    "gate_kernel": gate_kernel,
    "gate_gradient_kernel": gate_kernel,
    "rotary_kernel": rotary_kernel,
}

ARCHITECTURES = (80, 86, 89, 90, 100, 120)
VOCABULARIES = (50257, 128256, 152064, 256000, 262144)
# What P3O's settings can be, of those that kernels are compiled for.
CLIPPINGS, KL_REWARDS = (
    get_args(get_type_hints(P3OSettings)[name]) for name in ("clipping", "kl_reward")
)
# Responses to a prompt: the smallest of each size of tile, and the largest that is foreseen.
RESPONSES = (2, 3, 5, 9, 32)
HEAD_SIZES = (64, 80, 96, 128, 256)
SLOTS = (16, 256)
# Rows that are normalised: of heads, and of the stream.
HEAD_NORMS, STREAM_NORMS = (64, 128, 256), (640, 2048, 4096, 8192)
# bf16 takes what fp16 does.
WIDTHS = ("fp32", "fp16")
# Responses to a prompt and heads of a group: of each size of tile one, the smallest tile also at
# its fullest.
RESPONSES_AND_HEADS = ((1, 1), (4, 4), (4, 8), (8, 8))
# Bytes of shared memory that a block can have.
SHARED_LIMIT = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024} | dict.fromkeys(
    (86, 89, 120), 99 * 1024
)
# Bytes of stack: two registers, which ptxas spills here and there for more programs at once.
STACK_LIMIT = 8
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
ELEMENT_BYTES = {name: dtype.itemsize for name, dtype in DTYPES.items()}
SCALARS = {
    **dict.fromkeys(("row_stride", "dlogits_row_stride", "out_row_stride"), "i64"),
    **dict.fromkeys(
        ("ignore_index", "N", "S", "P", "size", "writes", "terms_stride", "mean_over"), "i32"
    ),
    **{f"{tensor}_size": "i32" for tensor in ("first", "second", "third", "fourth")},
    **dict.fromkeys(
        ("prompts", "prompt_room", "response_room", "prompt_chunks", "chunks", "window"), "i32"
    ),
    **{
        f"{tensor}_{part}_stride": "i32"
        for tensor in ("query", "key", "value")
        for part in ("slot", "token", "head")
    },
    **dict.fromkeys(
        (
            "rows",
            "programs",
            "x_group_stride",
            "gate_row_stride",
            "up_row_stride",
            "R",
            "Lr",
            "last_end",
        ),
        "i32",
    ),
    **dict.fromkeys(
        (
            "eps",
            "inverse_temperature",
            "scale",
            "softcap",
            "clip_range",
            "ratio_cap",
            "kl_coef",
            "sampler_ratio_cap",
        ),
        "fp32",
    ),
}


Constants = dict[str, object]


@dataclass(frozen=True)
class Configuration:
    """A kernel with the dtypes of its pointers (fp32 unless named), its compile-time constants and
    its warps.

    registers: of a thread at most; None for the compiler's choice.
    """

    kernel: str
    name: str
    pointers: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, object], ...]
    warps: int
    registers: int | None = None
    aligned: bool = True  # whether rows begin at 16-byte addresses


class Compiled(TypedDict):
    """A kernel's registers a thread, bytes of stack, where spills show, and of shared memory; some
    instructions.
    """

    kernel: str
    configuration: str
    architecture: str
    warps: int
    registers: int
    stack: int
    spills: int
    shared: int
    wide_loads: int
    tensor_core: int


def configurations(vocabularies: tuple[int, ...]) -> Iterator[Configuration]:
    """The settings that the launching functions can ask for."""
    for V in vocabularies:
        yield from logits_configurations(V)
        yield from bias_configurations(V)
        yield from exponentials_configurations(V)
        B = sampling.block_size(V)
        yield configuration(
            "race_kernel", f"V {V}", {}, {"V": V, "B": B, **sampling_kernel.tile(V, B)}
        )
        yield configuration("top_p_kernel", f"V {V}", {}, {"V": V})
    for clipping, kl_reward, K, valid in product(CLIPPINGS, KL_REWARDS, RESPONSES, (False, True)):
        settings = P3OSettings(clipping=clipping, kl_reward=kl_reward)
        yield pair_configuration(settings, K, valid=valid)
    # Importance weights add the same few instructions to each, and the flags of valid responses
    # take the most beside.
    for clipping, K in product(CLIPPINGS, RESPONSES):
        settings = P3OSettings(clipping=clipping, kl_reward="current")
        yield pair_configuration(settings, K, valid=True, sampler=True)
        yield pair_configuration(settings, K, valid=True, sampler=True, of_pairs=True)
    blocks = {"BLOCK_R": pair_kernel.BLOCK_R}
    yield configuration("results_kernel", "", {}, blocks, warps=pair_kernel.RESULTS_WARPS)
    blocks = {"BLOCK_S": sequence_kernel.BLOCK_S, "BLOCK_T": sequence_kernel.BLOCK_T}
    yield configuration("sequence_sums_kernel", "", {}, blocks)
    for dtype in ELEMENT_BYTES:
        tensors = dict.fromkeys(("first_ptr", "second_ptr", "third_ptr", "fourth_ptr"), dtype)
        yield configuration("scale_kernel", dtype, tensors, {"BLOCK": scale_kernel.BLOCK})
    constants: Constants = {
        "LARGEST": backward.LARGEST_SCALED,
        "HIGHEST": backward.HIGHEST_SCALE,
        "BLOCK": scale_kernel.BLOCK,
    }
    yield configuration("lowered_scale_kernel", "", {}, constants)
    for R in SLOTS:
        yield configuration("take_kernel", f"R {R}", {}, {"BLOCK_R": R})
        for K in RESPONSES:
            yield configuration("members_kernel", f"R {R}, K {K}", {}, {"K": K, "BLOCK_R": R})
    for D in HEAD_SIZES:
        yield from decoding_configurations(D)
    for D in HEAD_NORMS:
        yield from rotary_configurations(D)
        yield from norm_configurations(D, ("alone",))
    for D in STREAM_NORMS:
        yield from norm_configurations(D, ("alone", "sum before", "sum behind"))
    for dtype, activation in product(ELEMENT_BYTES, ACTIVATIONS):
        constants = {"ACTIVATION": activation, "BLOCK": gate_kernel.BLOCK}
        for kernel in ("gate_kernel", "gate_gradient_kernel"):
            pointers = dict.fromkeys(
                ("grad_ptr", "gate_ptr", "up_ptr", "result_ptr", "dgate_ptr", "dup_ptr"), dtype
            )
            yield configuration(kernel, f"{dtype}, {activation}", pointers, constants)


def pair_configuration(
    settings: P3OSettings,
    K: int,
    *,
    valid: bool,
    sampler: bool = False,
    of_pairs: bool = False,
) -> Configuration:
    """valid: some responses take part in no pair. sampler: pairs have importance weights. of_pairs:
    rewards are the differences of pairs.
    """
    constants: Constants = {
        "CLIPPING": settings.clipping,
        "KL_REWARD": settings.kl_reward,
        "OF_PAIRS": of_pairs,
        "K": K,
    }
    constants |= {} if valid else {"valid_ptr": None}
    constants |= {} if sampler else {"sampler_logprobs_ptr": None}
    constants["MEAN_OVER"] = pair_kernel.mean_over(K, settings)
    constants |= pair_kernel.block_sizes(K)
    name = (
        f"{settings.clipping}, kl {settings.kl_reward}, K {K}"
        + ", valid" * valid
        + ", weights" * sampler
        + ", of pairs" * of_pairs
    )
    return configuration("pair_kernel", name, {"valid_ptr": "u8"}, constants)


def logits_configurations(V: int) -> Iterator[Configuration]:
    # Logits from outside: of any dtype, and their gradient has it too. The head's own: fp32,
    # transformed.
    outside = [(dtype, dtype, False, False) for dtype in ELEMENT_BYTES]
    from_head = [
        ("fp32", out, bias, cap)
        for out in ELEMENT_BYTES
        for bias in (False, True)
        for cap in (False, True)
    ]
    every = dict.fromkeys(outside + from_head)
    for dtype, bias, cap in dict.fromkeys((dtype, bias, cap) for dtype, _, bias, cap in every):
        yield logits_configuration("logprobs_kernel", V, dtype, None, bias, cap)
        yield logits_configuration("statistics_kernel", V, dtype, None, bias, cap)
    for dtype, out, bias, cap in every:
        for entropy in (False, True):
            yield logits_configuration("dlogits_kernel", V, dtype, out, bias, cap, entropy=entropy)


def exponentials_configurations(V: int) -> Iterator[Configuration]:
    group = logits_kernel.LOAD_BYTES // ELEMENT_BYTES["fp32"]
    for (name, dtype), cap in product(DTYPES.items(), (False, True)):
        constants: Constants = {"V": V, "BLOCK_V": logits_kernel.block_size(V), "GROUP": group}
        constants["LARGEST"] = exponentials_kernel.LARGEST_SUMS[dtype]
        constants |= {} if cap else {"softcap": None}
        parts = ", ".join(filter(None, [f"fp32 to {name}", "softcap" * cap, f"V {V}"]))
        yield configuration("exponentials_kernel", parts, {"out_ptr": name}, constants)


def bias_configurations(V: int) -> Iterator[Configuration]:
    blocks: Constants = {
        "V": V,
        "BLOCK_R": logits_kernel.BIAS_BLOCK_R,
        "BLOCK_C": logits_kernel.BIAS_BLOCK_C,
    }
    for cap, entropy in product((False, True), (False, True)):
        constants = blocks | ({} if cap else {"softcap": None})
        constants |= {} if entropy else {"entropy_ptr": None, "entropy_coefficients_ptr": None}
        name = ", ".join(filter(None, ["fp32", "softcap" * cap, "entropy" * entropy, f"V {V}"]))
        pointers = {"bias_ptr": "bf16"}
        yield configuration(
            "bias_gradient_kernel", name, pointers, constants, logits_kernel.BIAS_WARPS
        )


def logits_configuration(
    kernel: str,
    V: int,
    dtype: str,
    out: str | None,
    bias: bool,
    cap: bool,
    *,
    entropy: bool = False,
) -> Configuration:
    """out: dtype of the gradient, None for a kernel without."""
    constants: Constants = {"V": V, "BLOCK_V": logits_kernel.block_size(V)}
    constants |= ({} if bias else {"bias_ptr": None}) | ({} if cap else {"softcap": None})
    pointers = {"logits_ptr": dtype, "bias_ptr": "bf16"}
    # The head's rows are padded, a caller's are not.
    aligned = dtype == "fp32" or V % ALIGNMENT == 0
    if out is None:
        constants["GROUP"] = logits_kernel.LOAD_BYTES // ELEMENT_BYTES[dtype] if aligned else 1
    else:
        constants |= {} if entropy else {"entropy_ptr": None, "entropy_coefficients_ptr": None}
        pointers["dlogits_ptr"] = out
    parts = [
        dtype + (f" to {out}" if out else ""),
        "bias" * bias,
        "softcap" * cap,
        "entropy" * entropy,
        f"V {V}",
    ]
    return replace(
        configuration(kernel, ", ".join(filter(None, parts)), pointers, constants), aligned=aligned
    )


def decoding_configurations(D: int) -> Iterator[Configuration]:
    # Windows and soft caps take the most registers; bf16 and fp16 differ only in the type of
    # instructions.
    half = [("bf16", K, G, True) for K, G in (*RESPONSES_AND_HEADS, (16, 2))] + [
        ("fp16", 4, 4, False)
    ]
    for dtype, K, G, limited in half + [
        ("fp32", K, G, True) for K, G in ((2, 6), (4, 4), (8, 8), (16, 4))
    ]:
        blocks = attention_kernel.block_sizes(D, K, G, ELEMENT_BYTES[dtype])
        sizes = {"K": K, "G": G, "HKV": 8, "D": D, "CHUNK": attention_kernel.CHUNK}
        constants: Constants = {**sizes, **blocks}
        constants |= {} if limited else {"softcap": None, "window": None}
        tensors = (
            "query",
            "key",
            "value",
            "prompt_keys",
            "prompt_values",
            "own_keys",
            "own_values",
        )
        pointers = {f"{tensor}_ptr": dtype for tensor in tensors}
        name = f"{dtype}, D {D}, K {K}, G {G}" + ", window, softcap" * limited
        warps = attention_kernel.warps(blocks, ELEMENT_BYTES[dtype])
        yield configuration("partial_attention_kernel", name, pointers, constants, warps)
    constants = {"H": 32, "D": D, "CHUNK": attention_kernel.CHUNK, "PROMPT_CHUNKS": 8, "CHUNKS": 12}
    constants |= {"BLOCK_D": blocks["BLOCK_D"], "BLOCK_S": attention_kernel.MERGE_BLOCK}
    yield configuration(
        "merge_kernel", f"bf16, D {D}", {"out_ptr": "bf16"}, constants, attention_kernel.MERGE_WARPS
    )


def norm_configurations(D: int, places: tuple[str, ...]) -> Iterator[Configuration]:
    """Norms alone in Llama's way; for a stream in fp32 with a sum before them, and Gemma's with one
    behind them.
    """
    sizes = norm_kernel.tile(D)
    for dtype, place in product(WIDTHS, places):
        before, behind = place == "sum before", place == "sum behind"
        gemma = {"OFFSET": 1.0 if behind else 0.0, "ROUNDS": place == "alone" and dtype != "fp32"}
        name, weight = f"{dtype}, {place}, D {D}", {"weight_ptr": dtype}
        pointers = weight | {"added_ptr": dtype, "x_ptr": "fp32" if before else dtype}
        pointers |= {"result_ptr": "fp32" if behind else dtype}
        absent = {} if before else {"added_ptr": None, "sum_ptr": None}
        absent |= {} if behind else {"residual_ptr": None}
        constants = sizes | gemma | absent | {"x_group_stride": None, "GROUP": None}
        yield configuration("rms_norm_kernel", name, pointers, constants, norm_kernel.warps(D))
        if D in HEAD_NORMS:
            apart = sizes | gemma | absent | {"GROUP": 8}
            yield configuration(
                "rms_norm_kernel",
                f"{name}, heads of one product",
                pointers,
                apart,
                norm_kernel.warps(D),
            )
        pointers = weight | {
            "x_ptr": pointers["x_ptr"],
            "dx_ptr": pointers["x_ptr"],
            "copy_ptr": dtype,
        }
        pointers |= {"grad_ptr": "fp32" if behind else dtype}
        constants = sizes | gemma | ({} if before else {"grad_x_ptr": None, "copy_ptr": None})
        gradient = configuration(
            "rms_norm_gradient_kernel", name, pointers, constants, norm_kernel.gradient_warps(D)
        )
        yield replace(gradient, registers=norm_kernel.gradient_registers(D, ELEMENT_BYTES[dtype]))
    for dtype in WIDTHS:
        constants = {"D": D, "BLOCK_C": norm_kernel.BLOCK_C, "BLOCK_P": norm_kernel.BLOCK_P}
        yield configuration(
            "weight_gradient_kernel", f"{dtype}, D {D}", {"dweight_ptr": dtype}, constants
        )


def rotary_configurations(D: int) -> Iterator[Configuration]:
    """Whole heads with a half beside a half, and a part of them in neighbours, each way."""
    for dtype, interleaved, back in product(WIDTHS, (False, True), (False, True)):
        R = D // 2 if interleaved else D
        constants = {**rotary_kernel.sizes(32, 8, D, R), "INTERLEAVED": interleaved, "BACK": back}
        tensors = ("query_ptr", "key_ptr", "cos_ptr", "sin_ptr", "query_out_ptr", "key_out_ptr")
        name = f"{dtype}, D {D}" + ", neighbours" * interleaved + ", back" * back
        yield configuration("rotary_kernel", name, dict.fromkeys(tensors, dtype), constants)


def configuration(
    kernel: str,
    name: str,
    pointers: dict[str, str],
    constants: Mapping[str, object],
    warps: int | None = None,
) -> Configuration:
    """warps: the file's WARPS if None."""
    file = KERNELS[kernel]
    warps, registers = file.WARPS if warps is None else warps, getattr(file, "REGISTERS", None)
    return Configuration(
        kernel, name, tuple(pointers.items()), tuple(constants.items()), warps, registers
    )


def sample(every: list[Configuration]) -> list[Configuration]:
    """Configurations that together take every branch of every kernel: each width of each pointer's
    elements, and each value of each constant that is no number.
    """

    def branches(config: Configuration) -> set[tuple[str, str, object]]:
        widths = [(name, ELEMENT_BYTES.get(dtype, dtype)) for name, dtype in config.pointers]
        choices = [(name, value) for name, value in config.constants if type(value) is not int]
        return {(config.kernel, name, value) for name, value in (*widths, *choices, ("", ""))}

    chosen: list[Configuration] = []
    seen: set[tuple[str, str, object]] = set()
    while left := max((branches(config) - seen for config in every), key=len):
        chosen.append(next(config for config in every if branches(config) - seen == left))
        seen |= left
    return chosen


def compiler_source(config: Configuration) -> ASTSource:
    kernel = getattr(KERNELS[config.kernel], config.kernel)
    pointers, constants = dict(config.pointers), dict(config.constants)
    integers = {"labels_ptr": "i64", "cu_seqlens_ptr": "i32", "members_ptr": "i32"}
    longs = (
        "prompt",
        "prompt_lengths",
        "cached_lengths",
        "response",
        "steps",
        "keys",
        "tokens",
        "inputs",
        "sampled",
    )
    integers |= {f"{name}_ptr": "i64" for name in (*longs, "first_tokens", "total", "taken")} | {
        "ends_ptr": "u8"
    }
    signature, attributes = {}, {}
    for position, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
        elif name.endswith("_ptr"):
            signature[name] = "*" + (integers | pointers).get(name, "fp32")
        else:
            signature[name] = kernel.params[position].annotation_type or SCALARS[name]
        # Allocations and rows begin at such addresses; without it the compiler would have to load
        # single elements.
        at_any_address = (
            name in kernel.do_not_specialize
            or kernel.params[position].do_not_specialize_on_alignment
        )
        at_any_address |= name.endswith("row_stride") and not config.aligned
        if (
            name.endswith(("_ptr", "_stride", "size"))
            and name not in constants
            and not at_any_address
        ):
            attributes[(position,)] = [["tt.divisibility", 16]]
    positions = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    return ASTSource(kernel, signature, positions, attributes)


def compile_for(config: Configuration, architecture: int) -> CompiledKernel:
    options = {"num_warps": config.warps, "maxnreg": config.registers}
    return triton.compile(
        compiler_source(config), target=GPUTarget("cuda", architecture, 32), options=options
    )


def compiled(config: Configuration, architecture: int) -> Compiled:
    result = compile_for(config, architecture)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(result.asm["cubin"])
        file.flush()
        usage = run(TOOLS / "cuobjdump", "--dump-resource-usage", file.name)
        sass = run(TOOLS / "nvdisasm", "-c", file.name)
    return {
        "kernel": config.kernel,
        "configuration": config.name,
        "architecture": f"sm_{architecture}",
        "warps": config.warps,
        "registers": first_number("REG", usage),
        "stack": first_number("STACK", usage),
        "spills": len(re.findall(r"\b(?:STL|LDL)\b", sass)),
        "shared": result.metadata.shared,
        "wide_loads": len(re.findall(r"\bLDG\.E\.(?:\w+\.)*128\b", sass)),
        "tensor_core": len(re.findall(r"\b(?:HGMMA|HMMA|UTCHMMA|QGMMA)\b", sass)),
    }


def first_number(name: str, usage: str) -> int:
    """Of a name in what cuobjdump says of a kernel."""
    found = re.search(rf"{name}:(\d+)", usage)
    assert found is not None, usage
    return int(found[1])


def run(*command: object) -> str:
    return subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, check=True
    ).stdout


def sources() -> str:
    """A hash of all files with code that is compiled, to tell a table of other kernels."""
    files = sorted(Path(fastp3o_kernels.__file__).parent.rglob("*_kernel.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def failures(table: list[Compiled]) -> list[str]:
    """Lists what must not be: more than two registers spilled to the stack, or more shared memory
    than a block has.
    """
    return [
        f"{entry['kernel']} ({entry['configuration']}) on {entry['architecture']}: {entry['stack']} bytes of stack, "
        f"{entry['spills']} spills, {entry['shared']} bytes of shared memory"
        for entry in table
        if entry["stack"] > STACK_LIMIT
        or entry["shared"] > SHARED_LIMIT[int(entry["architecture"].removeprefix("sm_"))]
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, help="JSON to write.")
    parser.add_argument("--vocabularies", type=int, nargs="+", default=VOCABULARIES)
    parser.add_argument(
        "--sample", action="store_true", help="Every branch of every kernel, but not all sizes."
    )
    parser.add_argument("--architectures", type=int, nargs="+", default=ARCHITECTURES)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TRITON_CACHE_DIR"] = cache
        every = list(configurations(tuple(arguments.vocabularies)))
        chosen = sample(every) if arguments.sample else every
        work = [(c, a) for a in arguments.architectures for c in chosen]
        with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn")) as pool:
            table = list(
                pool.map(compiled, *zip(*work, strict=True), chunksize=1 if arguments.sample else 8)
            )
    lines = [list(Compiled.__annotations__), *(list(map(str, entry.values())) for entry in table)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)))
    if arguments.output:
        record = {"triton": triton.__version__, "sources": sources()}
        entries = ",\n".join(json.dumps(entry) for entry in table)
        arguments.output.write_text(json.dumps(record)[:-1] + f', "kernels": [\n{entries}\n]}}\n')
    failed = failures(table)
    spilled = sum(entry["spills"] > 0 for entry in table)
    print(f"{len(table)} compiled, {spilled} with spills, {len(failed)} failed", *failed, sep="\n")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
