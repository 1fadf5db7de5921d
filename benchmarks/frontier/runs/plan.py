"""The fields of a run. Runs of a comparison share task and seed: prompts, order and sampling noise
are the same.
"""

from dataclasses import asdict, dataclass

CLIPPINGS = ("joint", "separate", "none")
BETA = 0.1  # the KL coefficient of most comparisons, in standard deviations of the reward per nat

# Fields that the first recorded runs lack.
LATER = (
    "own_parameter",
    "reward_factor",
    "rounds_ahead",
    "correction",
    "inner_epochs",
    "reward_spread",
    "updates",
    "critic_learning_rate",
    "value_clip_range",
    "kl_per_update",
)


@dataclass(frozen=True)
class Run:
    """One training run; equal runs give equal weights on the same machine."""

    task: str
    algorithm: str  # P3O's clipping, or another algorithm of one_run.OWN_SETTINGS
    learning_rate: float
    kl_coef: float
    seed: int
    offset: str = "none"  # none or unlearnable
    offset_sd: float = 0.0  # standard deviation over prompts, in standard deviations of the reward
    responses_per_prompt: int = 2
    prompts_per_update: int = 64
    own_parameter: float = 0.0  # the algorithm's entry in one_run.OWN_PARAMETERS; 0: its default
    reward_factor: float = 1.0  # rewards are multiplied by it
    rounds_ahead: int = 0  # updates between the policy that sampled and the one that trains
    correction: str = "none"  # of stale rollouts, one of stale.CORRECTIONS
    inner_epochs: int = 0  # passes over a round; 0: the algorithm's default
    updates: int = 0  # 0: those of the task
    # standard deviation of the log of a factor that each prompt's rewards have
    reward_spread: float = 0.0

    critic_learning_rate: float = 0.0  # of PPO; 0: that of one_run.PPO_SETTINGS
    value_clip_range: float = 0.0  # of PPO; 0: that of one_run.PPO_SETTINGS
    kl_per_update: float = 0.0  # nats that the learning rate follows; 0: it stays

    @property
    def name(self) -> str:
        """All fields in their order; LATER ones only if they are not the default."""
        values = asdict(self)
        later = {field: values.pop(field) for field in LATER}
        named = [written(value) for value in values.values()]
        return "-".join(
            named
            + [
                f"{field}={written(value)}"
                for field, value in later.items()
                if value != getattr(Run, field)
            ]
        )


def written(value: float | str) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
