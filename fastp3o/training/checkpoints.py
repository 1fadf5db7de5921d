"""Models as transformers loads them, and the state from which a run goes on exactly.

output_dir/model/                 the finished model
output_dir/checkpoint-000050/     the model after step 50
output_dir/state/                 what resuming needs; the last one only
output_dir/stopped-in-000061/     the model before the step in which a value was not finite
"""

import json
import shutil
import tempfile
from pathlib import Path

import torch
import torch.distributed.checkpoint as distributed
import yaml
from accelerate import Accelerator
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from fastp3o.config import StageConfig
from fastp3o.models.packed_model import PackedModel
from fastp3o.models.trainable import as_it_is, whole_model
from fastp3o.training.optimizer import Optimizer

FINISHED_MODEL = "model"
STATE = "state"
PARTS = "parts"
CONFIG = "config.yaml"
PROGRESS = "progress.json"
# Of a model's weights: as much of them is in memory at a time.
LARGEST_FILE = "5GB"


def prepare_output_dir(accelerator: Accelerator, config: StageConfig) -> Path:
    """Makes the run's folder and writes its configuration there.

    Raises FileExistsError where the folder holds a run that this one does not resume, and FileNotFoundError where there
    is no state to resume from.
    """
    folder = Path(config.output_dir)
    written = folder / CONFIG
    if written.exists() and not config.resume:
        raise FileExistsError(f"{folder} holds a run already: continue it with --resume, or name another --output_dir")
    if config.resume and not (folder / STATE).exists():
        raise FileNotFoundError(f"--resume: there is no state in {folder}")
    if config.resume:
        report_changes(accelerator, yaml.safe_load(written.read_text()), vars(config))
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        folder.mkdir(parents=True, exist_ok=True)
        written.write_text(yaml.safe_dump({k: v for k, v in vars(config).items() if v is not None}, sort_keys=False))
    return folder


def report_changes(accelerator: Accelerator, before: dict, now: dict) -> None:
    for name, value in now.items():
        if name != "resume" and before.get(name) != value:
            accelerator.print(f"resuming with another {name}: {before.get(name)} before, {value} now")


def save_model(
    accelerator: Accelerator,
    model: PackedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    dtype: torch.dtype | None = None,
) -> None:
    """Writes weights (safetensors), LoRA adapters merged, configuration and tokenizer in transformers' layout.

    dtype: of the weights written; None for that of the model's.
    """
    unfinished = folder.with_name(folder.name + ".unfinished")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix="gathered-") as gathered:
        several, is_main = accelerator.num_processes > 1, accelerator.is_main_process
        keep = KeptOnDisk(Path(gathered), drop=not is_main) if several else as_it_is
        whole, weights = whole_model(model.model, dtype, keep=keep)
        if is_main:
            whole.save_pretrained(unfinished, state_dict=weights, max_shard_size=LARGEST_FILE)
            tokenizer.save_pretrained(unfinished)
    move_into_place(accelerator, unfinished, folder)


class KeptOnDisk:
    """Keeps weights in files of a folder, since together they need not fit the memory; or drops them."""

    def __init__(self, folder: Path, *, drop: bool):
        self.folder, self.drop, self.count = folder, drop, 0

    def __call__(self, weight: Tensor) -> Tensor:
        if self.drop:
            return weight.new_empty(0)
        self.count += 1
        file = str(self.folder / str(self.count))
        return torch.from_file(file, shared=True, size=weight.numel(), dtype=weight.dtype).view_as(weight).copy_(weight)


def save_state(accelerator: Accelerator, optimizer: Optimizer, folder: Path, step: int) -> None:
    """Writes each process's part of what trains and of the moments, what was registered with the accelerator, and the
    number of steps done.
    """
    unfinished = folder.with_name(folder.name + ".unfinished")
    accelerator.save_state(str(unfinished))
    alone = accelerator.num_processes == 1
    distributed.save(optimizer.state_dict(), checkpoint_id=unfinished / PARTS, no_dist=alone)
    if accelerator.is_main_process:
        (unfinished / PROGRESS).write_text(json.dumps({"step": step}))
    move_into_place(accelerator, unfinished, folder)


def load_state(accelerator: Accelerator, optimizer: Optimizer, folder: Path) -> int:
    """Restores what `save_state` wrote, on any number of processes, and returns the number of steps done."""
    accelerator.load_state(str(folder))
    state = optimizer.state_dict()
    distributed.load(state, checkpoint_id=folder / PARTS, no_dist=accelerator.num_processes == 1)
    optimizer.load_state_dict(state)
    return json.loads((folder / PROGRESS).read_text())["step"]


def move_into_place(accelerator: Accelerator, unfinished: Path, folder: Path) -> None:
    """A stop at any moment leaves the old folder or the new one whole, under either name."""
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        replaced = folder.with_name(folder.name + ".replaced")
        if folder.exists():
            folder.rename(replaced)
        unfinished.rename(folder)
        shutil.rmtree(replaced, ignore_errors=True)
    accelerator.wait_for_everyone()
