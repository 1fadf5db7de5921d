"""Objectives of a chosen and a rejected response to each prompt. Column 0 is the chosen one."""

from dataclasses import dataclass

from torch import Tensor

from fastp3o.objectives.offline.config import PreferenceConfig, square_kl
from fastp3o_kernels import Groups


@dataclass(frozen=True, kw_only=True)
class PairConfig(PreferenceConfig):
    """Learning from pairs: all but the objective's own settings."""

    def metrics(self, pairs: Groups) -> dict[str, Tensor]:
        """Of the scores that the objective ranks by, log π/π_ref, or log π where it has no reference, in nats per
        response, or per token where it takes means:

        accuracy: 1 where the chosen response's is higher, a half where they are equal. margin: by how much it is.
        log_ratio_chosen, log_ratio_rejected (logprob_chosen, logprob_rejected): the scores. k2: see `square_kl`.
        """
        scores = self.logprobs(pairs)
        if self.needs_reference:
            scores = scores - self.ref_logprobs(pairs)
        margins = scores[:, 0] - scores[:, 1]
        kind = "log_ratio" if self.needs_reference else "logprob"
        metrics = {
            "accuracy": ((margins.sign() + 1) / 2).sum(),
            "margin": margins.sum(),
            f"{kind}_chosen": scores[:, 0].sum(),
            f"{kind}_rejected": scores[:, 1].sum(),
        }
        return metrics | ({"k2": square_kl(pairs).sum()} if self.needs_reference else {})
