"""Every kernel compiles ahead of time for the architectures in use, at a real vocabulary, and spills no register."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

COMPILE = r"""
import json, subprocess, sys, tempfile
from pathlib import Path
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from importlib import import_module
pair_loss, token_logprobs = (import_module(f"fastp3o_kernels.{m}") for m in ("pair_loss", "token_logprobs"))

tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
FP32 = {"ratio_cap", "clip_range", "kl_coef", "inverse_temperature"}
INT = {"row_stride": "i64", "dlogits_row_stride": "i64", "ignore_index": "i32", "P": "i32", "N": "i32"}
INT_POINTERS = {"labels_ptr": "*i64", "cu_seqlens_ptr": "*i32"}

def compile(fn, constants, warps, arch, logits_dtype="bf16"):
    signature, attrs = {}, {}
    for i, name in enumerate(fn.arg_names):
        if name in constants:
            signature[name] = "constexpr"
        elif name in INT_POINTERS:
            signature[name] = INT_POINTERS[name]
        elif name in ("logits_ptr", "dlogits_ptr"):
            signature[name] = "*" + logits_dtype
        elif name.endswith("_ptr"):
            signature[name] = "*fp32"
        else:
            signature[name] = "fp32" if name in FP32 else INT[name]
        if name.endswith("_ptr") or name.endswith("row_stride"):
            attrs[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn, signature, {(fn.arg_names.index(k),): v for k, v in constants.items()}, attrs)
    kernel = triton.compile(source, target=GPUTarget("cuda", arch, 32), options={"num_warps": warps})
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        text = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    usage = next(line for line in text.stdout.splitlines() if "REG:" in line)
    return dict(part.split(":") for part in usage.split() if ":" in part) | {"shared": kernel.metadata.shared}

rows = {"V": 128256, "BLOCK_V": token_logprobs.BLOCK_V}
pairs = {"KL_REWARD": "current", "LIMIT": 60.0, "BLOCK_P": pair_loss.BLOCK_P, "BLOCK_T": pair_loss.BLOCK_T}
results = {}
for arch in (80, 90, 100):
    results[f"logprobs {arch}"] = compile(token_logprobs.logprobs_kernel, rows, token_logprobs.WARPS, arch)
    results[f"dlogits {arch}"] = compile(
        token_logprobs.dlogits_kernel, rows | {"HAS_SCALE": True}, token_logprobs.WARPS, arch)
    for clipping in ("joint", "token"):
        results[f"pairs {clipping} {arch}"] = compile(
            pair_loss.pair_kernel, pairs | {"CLIPPING": clipping}, pair_loss.WARPS, arch)
print(json.dumps(results))
"""


@pytest.fixture(scope="module")
def usage(tmp_path_factory) -> dict[str, dict]:
    root = Path(__file__).parents[2]
    script = tmp_path_factory.mktemp("compile") / "compile_kernels.py"
    script.write_text(COMPILE)
    environment = os.environ | {
        "TRITON_INTERPRET": "0",
        "TRITON_CACHE_DIR": str(script.parent / "cache"),
        "PYTHONPATH": str(root / "kernels"),
    }
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_nothing_spills(usage):
    assert len(usage) == 12
    assert {name: of_kernel["STACK"] for name, of_kernel in usage.items() if of_kernel["STACK"] != "0"} == {}


def test_shared_memory_is_within_limits(usage):
    assert all(of_kernel["shared"] <= 99 * 1024 for of_kernel in usage.values())
