"""torch's C++ side of the pretended device (`cuda_without_gpu.cpp`), compiled on first use.

It must be loaded before torch, which looks for CUDA once and for all when it is imported.
"""

import ctypes
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).with_name("cuda_without_gpu.cpp")
BUILT = SOURCE.parent / ".build"
ROOT = SOURCE.parents[2]
COMPILER = os.environ.get("CXX", "g++")


def can_compile() -> bool:
    return shutil.which(COMPILER) is not None


@cache
def library() -> ctypes.CDLL:
    """The compiled file, loaded: torch's C++ code then finds devices. Raises RuntimeError if torch
    has been imported, and subprocess.CalledProcessError if the file does not compile.
    """
    if "torch" in sys.modules:
        raise RuntimeError("torch has been imported already, and has found no CUDA device")
    key = hashlib.sha256(SOURCE.read_bytes() + version("torch").encode()).hexdigest()[:16]
    built = BUILT / f"{key}.so"
    if not built.exists():
        compile_to(built)
    for name in ("libc10.so", "libtorch_cpu.so"):
        ctypes.CDLL(f"{torch_folder()}/lib/{name}", mode=ctypes.RTLD_GLOBAL)
    loaded = ctypes.CDLL(str(built))
    loaded.allocated_bytes.restype = loaded.peak_bytes.restype = ctypes.c_int64
    return loaded


def torch_folder() -> Path:
    return Path(importlib.util.find_spec("torch").origin).parent


def compile_to(built: Path) -> None:
    """Several processes may do so at once: the finished file takes its place in one step."""
    BUILT.mkdir(exist_ok=True)
    folder = torch_folder()
    with tempfile.TemporaryDirectory(dir=BUILT) as work:
        output = Path(work) / "library.so"
        command = [
            COMPILER,
            "-O1",
            "-std=c++20",
            "-shared",
            "-fPIC",
            str(SOURCE),
            "-o",
            str(output),
        ]
        command += [f"-I{folder}/include", f"-I{folder}/include/torch/csrc/api/include"]
        command += [f"-L{folder}/lib", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{folder}/lib"]
        subprocess.run(command, check=True, capture_output=True, text=True)
        os.replace(output, built)


@contextmanager
def memory_of(device: Any) -> Iterator[None]:
    """Counts memory that this thread allocates inside as the device's."""
    before = library().allocate_on(device.index)
    try:
        yield
    finally:
        library().allocate_on(before)
