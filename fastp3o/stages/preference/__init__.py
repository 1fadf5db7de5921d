"""Learning from fixed preferences, without sampling: DPO, KTO and their kin (`fastp3o.objectives.offline`).

task.py      the reference and its log-probs, the loss, evaluations of samples
pairs.py     a chosen and a rejected response to each prompt
unpaired.py  single responses, each desirable or not
"""

from fastp3o.objectives.offline.config import PreferenceConfig
from fastp3o.objectives.offline.kto import KTOConfig
from fastp3o.stages.preference.pairs import PreferencePairs
from fastp3o.stages.preference.unpaired import UnpairedPreferences
from fastp3o.stages.supervised import train_supervised


def train(config: PreferenceConfig) -> None:
    """Trains a policy on preferences with the objective of its configuration; `loss` is a mean over pairs, or over
    single responses.
    """
    train_supervised(UnpairedPreferences(config) if isinstance(config, KTOConfig) else PreferencePairs(config))
