"""TRL 1.15 and 1.16: P3O on the rollouts of GRPOTrainer, and the log-probabilities of TRL's own
losses.
"""

from fastp3o.integrations.trl.linear_logprobs import linear_logprobs_in_trl
from fastp3o.integrations.trl.p3o_trainer import P3OTrainer, TRLP3OConfig

__all__ = ["P3OTrainer", "TRLP3OConfig", "linear_logprobs_in_trl"]
