"""Every run that was recorded, none left out."""

from benchmarks.frontier.report import cells
from benchmarks.frontier.runs.records import Records

ORDER = ["task", "algorithm", "offset", "responses_per_prompt", "learning_rate", "kl_coef", "seed"]
# The table's columns: of the frame of runs, with the form of their figures.
COLUMNS = {
    "run": ("name", str),
    "first KL": ("first_kl", cells.number),
    "final KL": ("final_kl", cells.number),
    "final gain, proxy": ("final_reward", cells.number),
    "gold": ("final_gold", cells.number),
    "missing EOS": ("final_missing_eos", "{:.1%}".format),
    "weights": ("sha256", lambda digits: digits[:12]),
    "s": ("seconds", "{:.0f}".format),
}


def table(records: Records) -> list[list[str]]:
    """Header first."""
    runs = records.runs.sort_values(ORDER)
    columns = {name: runs[field].map(form, na_action="ignore") for name, (field, form) in COLUMNS.items()}
    return [list(columns), *zip(*(values.fillna("") for values in columns.values()), strict=True)]
