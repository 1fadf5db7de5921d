"""What a finished run has left in its folder, as objects."""

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import ADAPTER_CONFIG_NAME, CONFIG_NAME

from fastp3o.errors import UserError
from fastp3o.run.log import read
from fastp3o.run.names import ADAPTER, BEST_MODEL, EVALUATIONS, FINISHED_MODEL, METRICS

if TYPE_CHECKING:
    import pandas as pd

CLASSIFIER = "ForSequenceClassification"


@dataclass(frozen=True)
class Result:
    """What a finished run has left in its folder. output_dir: the folder."""

    output_dir: Path

    @cached_property
    def model(self) -> PreTrainedModel:
        """The finished model, loaded from the folder onto the CPU; with its adapter, if that alone was saved."""
        return load_model(self.output_dir / FINISHED_MODEL)

    @cached_property
    def best_model(self) -> PreTrainedModel:
        """The model of the best evaluation, which `keep_best` keeps. Raises UserError if none was kept."""
        folder = self.output_dir / BEST_MODEL
        if not folder.exists():
            raise UserError(f"{self.output_dir} has no {BEST_MODEL}: keep_best, the name of a metric, keeps one")
        return load_model(folder)

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        folder = self.output_dir / FINISHED_MODEL
        return AutoTokenizer.from_pretrained(folder if folder.exists() else self.output_dir / ADAPTER)

    @cached_property
    def history(self) -> "pd.DataFrame":
        """A row for each step: the metrics of metrics.jsonl, and those of eval.jsonl after `eval/`."""
        import pandas as pd

        def table(name: str) -> pd.DataFrame:
            lines = [*read(self.output_dir / name)]
            return pd.DataFrame(lines, columns=None if lines else ["step"]).set_index("step")

        return table(METRICS).join(table(EVALUATIONS).add_prefix("eval/"), how="outer")


def load_model(folder: Path) -> PreTrainedModel:
    """Loads a saved model. Where a run has saved the adapter alone, transformers loads the base and attaches it."""
    if (folder / CONFIG_NAME).exists():
        scores = json.loads((folder / CONFIG_NAME).read_text())["architectures"][0].endswith(CLASSIFIER)
    else:
        folder = folder.with_name(ADAPTER) if folder.name == FINISHED_MODEL else folder / ADAPTER
        scores = json.loads((folder / ADAPTER_CONFIG_NAME).read_text())["task_type"] == "SEQ_CLS"
    if scores:
        return AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1)
    return AutoModelForCausalLM.from_pretrained(folder)
