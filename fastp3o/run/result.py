"""What a finished run has left in its folder, as objects."""

import json
from base64 import b64encode
from collections import deque
from dataclasses import dataclass
from functools import cached_property
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import ADAPTER_CONFIG_NAME, ADAPTER_SAFE_WEIGHTS_NAME, CONFIG_NAME

from fastp3o.errors import UserError
from fastp3o.models.ends import checkpoint_ends, write_ends
from fastp3o.models.load_report import require_whole, without_report
from fastp3o.run.log import read, read_updates
from fastp3o.run.names import (
    ADAPTER,
    BEST_MODEL,
    EVALUATIONS,
    FINISHED_MODEL,
    METRICS,
    PROGRESS,
    ROLLOUTS,
)

if TYPE_CHECKING:
    import pandas as pd

CLASSIFIER = "ForSequenceClassification"
# The head of a reward model that was saved as an adapter: its name in peft's file, and in the
# loaded model.
SAVED_HEAD, TRAINED_HEAD = "base_model.model.score.weight", "score.modules_to_save.default.weight"
SHOWN = 3  # prompts in a notebook


@dataclass(frozen=True)
class Result:
    """The results that a finished run left in its folder. output_dir: the folder."""

    output_dir: Path

    @cached_property
    def model(self) -> PreTrainedModel:
        """The finished model, loaded from the folder onto the CPU; with its adapter, if that alone
        was saved.
        """
        return load_model(self.output_dir / FINISHED_MODEL)

    @cached_property
    def best_model(self) -> PreTrainedModel:
        """The model of the best evaluation, which `keep_best` keeps. Raises UserError if none was
        kept.
        """
        folder = self.output_dir / BEST_MODEL
        if not folder.exists():
            raise UserError(
                f"{self.output_dir} has no {BEST_MODEL}: keep_best, the name of a metric, keeps one"
            )
        return load_model(folder)

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        folder = self.output_dir / FINISHED_MODEL
        return AutoTokenizer.from_pretrained(
            folder if folder.exists() else self.output_dir / ADAPTER
        )

    @cached_property
    def history(self) -> "pd.DataFrame":
        """A row for each step: the metrics of metrics.jsonl, and those of eval.jsonl after `eval/`."""
        import pandas as pd

        def table(name: str) -> pd.DataFrame:
            lines = [*read(self.output_dir / name)]
            return pd.DataFrame(lines, columns=None if lines else ["step"]).set_index("step")

        return table(METRICS).join(table(EVALUATIONS).add_prefix("eval/"), how="outer")

    def _repr_html_(self) -> str:
        """The view in a notebook: the last metrics, the plot of them, and the responses that were
        logged last.
        """
        last = self.history.ffill().tail(1).T.to_html(float_format="{:.4g}".format, header=False)
        plot = self.output_dir / PROGRESS
        image = (
            f'<img src="data:image/png;base64,{b64encode(plot.read_bytes()).decode()}">'
            if plot.exists()
            else ""
        )
        samples = ""
        if last_update := deque(read_updates(self.output_dir / ROLLOUTS), maxlen=1):
            rows = "".join(
                f"<tr><td>{escape(group.prompt[-80:])}</td><td>{escape(response.text[:200])}</td><td>{response.reward:.3g}</td></tr>"
                for group in last_update[0][:SHOWN]
                for response in group.responses[:1]
            )
            samples = (
                f"<table><tr><th>prompt</th><th>response</th><th>reward</th></tr>{rows}</table>"
            )
        return f"<p>{escape(str(self.output_dir))}</p>{image}{last}{samples}"


def load_model(folder: Path) -> PreTrainedModel:
    """Loads a saved model. Where a run has saved the adapter alone, transformers loads the base and
    attaches it, whose settings get the ends and the padding of the run's model. Raises ValueError
    if the files are not whole.
    """
    may_lack: set[str] = set()
    options: dict[str, int] = {}  # a whole model's configuration says how many outputs it has
    may_exceed: set[str] = set()
    whole = (folder / CONFIG_NAME).exists()
    if whole:
        scores = json.loads((folder / CONFIG_NAME).read_text())["architectures"][0].endswith(
            CLASSIFIER
        )
    else:
        folder = folder.with_name(ADAPTER) if folder.name == FINISHED_MODEL else folder / ADAPTER
        scores = json.loads((folder / ADAPTER_CONFIG_NAME).read_text())["task_type"] == "SEQ_CLS"
        # A reward model's head is in the adapter's file, from which transformers before 5.24 does
        # not load it.
        may_lack, may_exceed = {"score.weight", TRAINED_HEAD}, {"score.weight", "lm_head.weight"}
        options = {"num_labels": 1} if scores else {}
    loader: Any = AutoModelForSequenceClassification if scores else AutoModelForCausalLM
    with without_report():
        model, loading = loader.from_pretrained(folder, output_loading_info=True, **options)
    require_whole(str(folder), loading, may_lack=may_lack, may_exceed=may_exceed)
    if not whole:
        if scores:
            head = load_file(folder / ADAPTER_SAFE_WEIGHTS_NAME)[SAVED_HEAD]
            model.state_dict()[TRAINED_HEAD].copy_(head)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        write_ends(model, tokenizer, checkpoint_ends(str(folder), tokenizer))
    return model
