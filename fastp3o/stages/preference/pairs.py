"""A chosen and a rejected response to each prompt, as they lie in packed rows."""

import torch

from fastp3o.data import load_preferences
from fastp3o.packing.pack import pack
from fastp3o.stages.preference.task import PreferenceRow, Preferences
from fastp3o.training.order import Examples


class PreferencePairs(Preferences):
    """Both responses share their prompt in the row."""

    load_examples = staticmethod(load_preferences)
    columns = (("chosen_ids", "rejected_ids"),)

    def pack(self, examples: Examples) -> list[PreferenceRow]:
        responses = list(zip(examples["chosen_ids"], examples["rejected_ids"], strict=True))
        of_batch = {"reference": torch.tensor(examples["reference"])} if self.config.needs_reference else {}
        rows = pack(examples["prompt_ids"], responses, self.config.packing)
        return [PreferenceRow.of(row, of_batch) for row in rows]
