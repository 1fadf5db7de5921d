"""Online DPO, to compare P3O with. `python scripts/online_dpo.py --help` explains every option."""

from fastp3o.config import parse
from fastp3o.objectives.preferences import OnlineDPOConfig
from fastp3o.script import run_script
from fastp3o.stages.online import train

if __name__ == "__main__":
    run_script(lambda: train(parse(OnlineDPOConfig)))
