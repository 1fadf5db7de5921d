"""Records -> the sections of pages that state their figures: none is typed.

`python -m benchmarks.report --write` writes them between their marks, and a test compares them.
"""

from pathlib import Path

from benchmarks.markdown import between_markers, markdown
from benchmarks.pages import counts, cpu, front, gallery, gpu, machines, memory, notes, runs
from benchmarks.pages.sources import Records, Section, records
from benchmarks.predicted_iteration import predicted_iterations

ROOT = Path(__file__).parents[2]
SECTIONS: dict[str, dict[str, Section]] = {
    "benchmarks/README.md": {
        "devices": machines.devices,
        "products": machines.products,
        "head": gpu.head,
        "gpu": gpu.others,
        "cpu": cpu.table,
        "chosen": cpu.chosen,
        "goals": machines.goals,
        "modeled": counts.modeled_table,
        "update launches": counts.launches("update"),
        "log-probs launches": counts.launches("logprobs"),
        "layers": counts.layers,
        "served": counts.served,
        "turns machine": counts.turns_machine,
        "turns": counts.turns,
        "predicted": lambda records: markdown(predicted_iterations()),
    },
    "benchmarks/NOTES.md": {
        "measured": notes.figures,
        "compiled": notes.compiled,
        "registers": notes.registers,
    },
    "README.md": {
        "memory": front.memory,
        "gpu": front.limit,
        "human win rate": runs.judged_rate("human_preferences.json"),
        "films win rate": runs.judged_rate("film_reviews.json"),
    },
    "fastp3o/integrations/README.md": {"in trl": front.in_trl},
    "fastp3o/objectives/README.md": {"trpo": runs.trpo},
    "fastp3o/training/compiled_layers.md": {"fused": counts.fused},
    "fastp3o/training/gallery.md": {"gallery": gallery.gallery, "options": gallery.typed},
    "fastp3o/training/memory.md": {"h100": front.calculator, "fits": memory.fits},
    "fastp3o/training/precision.md": {
        "precision": runs.precision,
        "lengths": runs.rounding_by_length,
    },
    "fastp3o/training/README.md": {
        "human kinds": runs.human_kinds,
        "alpaca_eval": runs.alpaca_eval,
        "alpaca_eval kinds": runs.alpaca_eval_kinds,
        "alpaca_eval length": runs.alpaca_eval_length,
    },
    "scripts/README.md": {
        "seeds": runs.seeds,
        "exploited": runs.exploited,
        "human": runs.real_task("human_preferences.json"),
        "human win rate": runs.judged_rate("human_preferences.json"),
        "human accuracies": runs.accuracies("human_preferences.json"),
        "human offsets": runs.human_offsets,
        "films": runs.real_task("film_reviews.json"),
        "films win rate": runs.judged_rate("film_reviews.json"),
        "films accuracies": runs.accuracies("film_reviews.json"),
        "game": runs.game,
        "critic": runs.game_lead(runs.PPO, "P3O"),
        "rewards by turn": runs.game_lead(runs.PPO, runs.AT_THE_END),
    },
}


def written(page: str, records: Records) -> str:
    """A page with all of its sections as the records give them. page: its path in the project."""
    text = (ROOT / page).read_text()
    for name, section in SECTIONS[page].items():
        text = between_markers(text, name, section(records))
    return text


def write() -> None:
    found = records()
    for page in SECTIONS:
        (ROOT / page).write_text(written(page, found))
