"""Models as transformers loads them, and the state from which a run goes on exactly.

output_dir/model/                 the finished model
output_dir/checkpoint-000050/     the model after step 50
output_dir/state/                 what resuming needs; the last one only
output_dir/stopped-in-000061/     the model before the step in which a value was not finite
"""

import json
import shutil
from pathlib import Path

import yaml
from accelerate import Accelerator
from torch import nn
from transformers import PreTrainedTokenizerBase

from fastp3o.config import StageConfig
from fastp3o.models.packed_model import unwrap
from fastp3o.models.trainable import whole_model

FINISHED_MODEL = "model"
STATE = "state"
CONFIG = "config.yaml"
PROGRESS = "progress.json"


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


def save_model(accelerator: Accelerator, model: nn.Module, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Writes weights (safetensors), LoRA adapters merged, configuration and tokenizer in transformers' layout."""
    unfinished = folder.with_name(folder.name + ".unfinished")
    if accelerator.is_main_process:
        whole, weights = whole_model(unwrap(model).model)
        whole.save_pretrained(unfinished, state_dict=weights)
        tokenizer.save_pretrained(unfinished)
    move_into_place(accelerator, unfinished, folder)


def save_state(accelerator: Accelerator, folder: Path, step: int) -> None:
    """Writes all that was prepared or registered with the accelerator, and the number of steps done."""
    unfinished = folder.with_name(folder.name + ".unfinished")
    accelerator.save_state(str(unfinished))
    if accelerator.is_main_process:
        (unfinished / PROGRESS).write_text(json.dumps({"step": step}))
    move_into_place(accelerator, unfinished, folder)


def load_state(accelerator: Accelerator, folder: Path) -> int:
    """Restores what `save_state` wrote and returns the number of steps done."""
    accelerator.load_state(str(folder))
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
