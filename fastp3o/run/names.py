"""Names of the files in a run's folder; its README.md says what each holds. rewards/config.py has
VERDICTS.
"""

CONFIG = "config.yaml"
STATES = "state"  # a folder for each
LOCK = "fastp3o.lock"
METRICS, EVALUATIONS = "metrics.jsonl", "eval.jsonl"
ROLLOUTS = "rollouts.jsonl"  # of online updates
LOGS = (METRICS, EVALUATIONS, ROLLOUTS)  # which grow while a run trains
# Metrics over the steps; all of it, by `fastp3o report`.
PROGRESS, REPORT = (
    "progress.png",
    "report.html",
)
FINISHED_MODEL, ADAPTER, BEST_MODEL = "model", "adapter", "best"
REFERENCE = r"reference-[0-9a-f]{16}\.safetensors"  # log-probs of fixed preferences
SAMPLES, KEPT = "samples.jsonl", "kept.jsonl"  # responses of fastp3o generate
