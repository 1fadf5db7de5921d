"""The machine and the code that a record is of, as it is written down and as pages say it."""

import os
import platform
import re
import subprocess
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

PACKAGES = (
    "torch",
    "triton",
    "transformers",
    "liger-kernel",
    "cut-cross-entropy",
    "quack-kernels",
    "trl",
    "flash-attn",
)
CPUINFO = Path("/proc/cpuinfo")


def environment() -> dict[str, object]:
    def installed(name: str) -> str | None:
        try:
            return version(name)
        except PackageNotFoundError:
            return None

    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    commit = subprocess.run(git, capture_output=True, text=True).stdout.strip()
    cuda = torch.cuda.is_available()
    return {
        "device": torch.cuda.get_device_name()
        if cuda
        else f"CPU ({torch.get_num_threads()} threads)",
        "cuda": torch.version.cuda if cuda else None,
        "processor": processor(),
        "python": platform.python_version(),
        "packages": {name: installed(name) for name in PACKAGES},
        "commit": commit or os.environ.get("FASTP3O_COMMIT"),
        "date": time.strftime("%Y-%m-%d"),
    }


def processor() -> str | None:
    """Name, family and model of the CPU. A name alone is often a cloud's: the family tells how wide
    the vector units are, on which products depend.
    """
    if not CPUINFO.exists():
        return platform.processor() or None
    lines = dict(re.findall(r"^([\w ]+?)\s*: (.*)$", CPUINFO.read_text(), re.MULTILINE))
    name = lines.get("model name") or platform.machine()
    numbers = [f"{key} {lines[key]}" for key in ("cpu family", "model") if key in lines]
    return ", ".join([name, *numbers]).replace("cpu family", "family")


def described(environment: dict | None) -> str:
    """What a record says of its machine and code, and what it does not."""
    if environment is None:
        return "device, processor, commit and date not recorded"
    packages = ", ".join(
        f"{name} {version}" for name, version in environment["packages"].items() if version
    )
    return f"{machine(environment)}; {packages}; {origin(environment)}"


def machine(environment: dict) -> str:
    return f"{environment['device']}, processor {environment.get('processor') or 'not recorded'}"


def origin(environment: dict) -> str:
    return f"commit {environment.get('commit') or 'not recorded'}, {environment['date']}"
