"""Launches of interpreted kernels -> what a GPU would compile for them, compiled without one.

    python -m pytest -p tests.kernels.launch_variants tests/kernels     # writes them to $LAUNCH_VARIANTS, a JSON file
    TRITON_INTERPRET=0 python -m tests.kernels.launch_variants FILE     # compiles them for sm_90; prints what fails

A variant has what Triton's cache tells apart: dtypes, alignment of pointers, integers that are 1 or multiples of 16,
constants and warps.
"""

import inspect
import json
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch

DTYPES = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.uint8: "u8",
    torch.bool: "i1",
}
OPTIONS = ("num_warps", "maxnreg", "num_stages")
VARIANTS: set[str] = set()


def variant(kernel: str, function: object, arguments: tuple, keywords: dict) -> str:
    """The JSON of a launch: types [name, type, multiple of 16], constants and options."""
    annotations = inspect.get_annotations(function)
    options = {name: keywords.pop(name) for name in OPTIONS if keywords.get(name) is not None}
    types, constants = [], {}
    for name, value in inspect.getcallargs(function, *arguments, **keywords).items():
        if isinstance(value, torch.Tensor):
            types.append((name, "*" + DTYPES[value.dtype], value.data_ptr() % 16 == 0))
        elif value is None or "constexpr" in str(annotations.get(name, "")):
            constants[name] = value
        elif isinstance(value, bool):
            types.append((name, "i1", False))
        elif isinstance(value, int):
            types.append((name, "i32" if -(2**31) <= value < 2**31 else "i64", value % 16 == 0))
            if value == 1:
                constants[name] = 1
        else:
            types.append((name, "fp32", False))
    return json.dumps({"kernel": kernel, "types": types, "constants": constants, "options": options})


@contextmanager
def recorded(variants: set[str]) -> Iterator[None]:
    """Adds the variants of all launches inside."""
    from triton.runtime import interpreter

    launch = interpreter.GridExecutor.__call__

    def recording(self, *arguments, **keywords):
        variants.add(variant(self.fn.__name__, self.fn, arguments, dict(keywords)))
        return launch(self, *arguments, **keywords)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter.GridExecutor, "__call__", recording)
        yield


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call():
    with recorded(VARIANTS):
        return (yield)


def pytest_sessionfinish() -> None:
    Path(os.environ["LAUNCH_VARIANTS"]).write_text(json.dumps(sorted(VARIANTS)))


def failure(text: str) -> str | None:
    """Compiles one variant: None, or what is wrong with it."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from benchmarks.compile_kernels import KERNELS, SHARED_LIMIT

    found = json.loads(text)
    kernel = getattr(KERNELS[found["kernel"]], found["kernel"])
    types = {name: (kind, aligned) for name, kind, aligned in found["types"]}
    constants = {
        name: value
        for name, value in found["constants"].items()
        if name not in types or name not in kernel.do_not_specialize
    }
    signature = {name: "constexpr" if name in constants else types[name][0] for name in kernel.arg_names}
    aligned = {
        (place,): [["tt.divisibility", 16]]
        for place, name in enumerate(kernel.arg_names)
        if name not in constants and types[name][1] and name not in kernel.do_not_specialize
    }
    places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(kernel, signature, places, aligned)
    try:
        result = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=found["options"])
    except Exception as error:
        return f"{type(error).__name__}: {error}\n{text}"
    return (
        f"{result.metadata.shared} bytes of shared memory\n{text}"
        if result.metadata.shared > SHARED_LIMIT[90]
        else None
    )


def main() -> None:
    variants = json.loads(Path(sys.argv[1]).read_text())
    if len(variants) <= 16:  # less than the start of more processes takes
        found = list(map(failure, variants))
    else:
        with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn")) as pool:
            found = list(pool.map(failure, variants, chunksize=4))
    failures = [text for text in found if text]
    kernels = sorted({json.loads(text)["kernel"] for text in variants})
    print(f"{len(variants)} variants of {', '.join(kernels)}: {len(failures)} failed", *failures, sep="\n")
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
