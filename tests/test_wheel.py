"""The sdist, and the wheel made of it, that an index would have: what they need and hold, and
whether they work.
"""

import os
import shutil
import subprocess
import sys
from importlib.metadata import PathDistribution
from importlib.util import find_spec
from pathlib import Path
from zipfile import ZipFile

import pytest
from packaging.metadata import Metadata
from packaging.requirements import Requirement

from fastp3o_kernels import __version__

ROOT = Path(__file__).parents[1]
SOURCES = ("pyproject.toml", "README.md", "LICENSE", "fastp3o", "kernels")

ONE_BACKWARD_PASS = """
import sys
from pathlib import Path

import torch

import fastp3o.trl_names
import fastp3o_kernels

for package in (fastp3o, fastp3o_kernels):
    assert Path(package.__file__).parents[1] == Path(sys.argv[1]), package.__file__
    assert package.__version__ == sys.argv[2], package.__version__

hidden, head = torch.randn(9, 8, requires_grad=True), torch.randn(16, 8, requires_grad=True)
labels, cu_seqlens = torch.arange(9), torch.tensor([0, 2, 5, 8, 9])
with torch.no_grad():
    logprobs = fastp3o_kernels.linear_logprobs(hidden, head, labels)
    old_logprobs = fastp3o_kernels.sequence_logprobs(logprobs, cu_seqlens).view(2, 2)
rewards = torch.tensor([[1.0, 0.0], [0.0, 2.0]])
loss, metrics, counts = fastp3o_kernels.linear_p3o_loss(
    hidden, head, labels, cu_seqlens, old_logprobs, old_logprobs, rewards
)
loss.backward()
assert hidden.grad.abs().sum() > 0 and head.grad.abs().sum() > 0
assert "--kl_coef" in fastp3o.trl_names.hint("beta", ["kl_coef"])  # from a page that the wheel has
"""


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the wheel holds, built from the sdist of a copy of the sources."""
    for needed in ("pip", "setuptools"):
        if find_spec(needed) is None:
            pytest.skip(f"building a wheel needs {needed}, which this interpreter does not have")
    sources, folder = tmp_path_factory.mktemp("sources"), tmp_path_factory.mktemp("wheel")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(
                ROOT / name,
                sources / name,
                ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"),
            )
        else:
            shutil.copy(ROOT / name, sources)
    build = f"from setuptools.build_meta import build_sdist; build_sdist({str(folder)!r})"
    built = subprocess.run(
        [sys.executable, "-c", build], cwd=sources, capture_output=True, text=True
    )
    assert built.returncode == 0, built.stdout + built.stderr
    (sdist,) = folder.glob("fastp3o-*.tar.gz")
    offline = ("--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check")
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        str(sdist),
        *offline,
        "--wheel-dir",
        str(folder),
    ]
    built = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    (wheel,) = folder.glob("fastp3o-*.whl")
    with ZipFile(wheel) as archive:
        archive.extractall(folder / "unpacked")
    return folder / "unpacked"


@pytest.fixture(scope="module")
def distribution(unpacked: Path) -> PathDistribution:
    (metadata,) = unpacked.glob("fastp3o-*.dist-info")
    return PathDistribution(metadata)


def test_both_packages_are_in_it_with_their_types_and_nothing_else(
    unpacked: Path, distribution: PathDistribution
):
    names = {"fastp3o", "fastp3o_kernels", f"fastp3o-{__version__}.dist-info"}
    assert {path.name for path in unpacked.iterdir()} == names
    for package, source in (
        ("fastp3o", ROOT / "fastp3o"),
        ("fastp3o_kernels", ROOT / "kernels" / "fastp3o_kernels"),
    ):
        assert (unpacked / package / "py.typed").is_file()
        modules = {path.relative_to(source) for path in source.rglob("*.py")}
        assert {
            path.relative_to(unpacked / package) for path in (unpacked / package).rglob("*.py")
        } == modules
    assert distribution.read_text("licenses/LICENSE") == (ROOT / "LICENSE").read_text()


def test_it_needs_torch_alone_and_the_trainer_is_an_extra(distribution: PathDistribution):
    requirements = [Requirement(line) for line in distribution.requires or ()]
    base = {r.name for r in requirements if "extra" not in str(r.marker)}
    assert base == {"torch"}
    assert distribution.version == __version__
    metadata = Metadata.from_email(distribution.read_text("METADATA") or "", validate=True)
    assert metadata.license_expression == "Apache-2.0"
    assert metadata.description.startswith("# fastp3o")

    def added_by(extra: str) -> set[str]:
        return {
            r.name for r in requirements if r.marker and r.marker.evaluate({"extra": extra})
        } - base

    trainer = "accelerate datasets httpx matplotlib pandas psutil pyyaml rich safetensors tensorboard tqdm transformers"
    assert added_by("trainer") == set(trainer.split())
    assert added_by("lora") == {"peft"}
    assert {"flash", "peers", "dev"} <= set(distribution.metadata.get_all("Provides-Extra"))


def test_it_is_imported_and_trains_without_the_repository(unpacked: Path, tmp_path: Path):
    elsewhere = [path for path in sys.path if not Path(path).resolve().is_relative_to(ROOT)]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(unpacked), *filter(None, elsewhere)]),
    }
    command = [sys.executable, "-c", ONE_BACKWARD_PASS, str(unpacked), __version__]
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
