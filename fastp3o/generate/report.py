"""Writes the samples that are kept, and sums up the run."""

import json
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from fastp3o.errors import UserError
from fastp3o.evaluation.judge import load_judge
from fastp3o.files import whole_file
from fastp3o.generate.config import JUDGED, NOTHING, PAIRS, GenerateConfig
from fastp3o.generate.samples import SamplesFile
from fastp3o.generate.selection import Judged, judged_records, kept_records
from fastp3o.rewards.config import VERDICTS


@dataclass
class Generated:
    """The summary of a run.

    prompts, responses, mean_reward, empty, unfinished, not_read_back: over all samples, also those
    before a run was resumed. not_read_back: responses, or last turns, with a text that as data
    would be other tokens. records: number kept. prompts_kept: prompts that have one. mean_kept:
    their mean reward, for pairs the mean margin. ties, unanswered: pairs that a judge has left
    undecided, or without a verdict. tokens_per_second: sampled since the start, without the time of
    rewards; 0 if nothing was left to sample. Means are None without rewards.
    """

    prompts: int = 0
    responses: int = 0
    mean_reward: float | None = None
    empty: int = 0
    unfinished: int = 0
    not_read_back: int = 0
    records: int = 0
    prompts_kept: int = 0
    mean_kept: float | None = None
    ties: int = 0
    unanswered: int = 0
    tokens_per_second: float = 0.0


def write_kept(config: GenerateConfig, samples: SamplesFile, path: Path) -> Generated:
    """Writes the records that are kept, in the order of the prompts. Raises UserError if there are
    none.
    """
    judged: Judged | None = None
    if config.keep == JUDGED:
        judge = load_judge(
            config, Path(config.verdicts) if config.verdicts else samples.path.with_name(VERDICTS)
        )
        assert judge is not None
        judged = judged_records(samples, judge, unfinished=config.keep_unfinished, seed=config.seed)
    rewards, kept = [], []
    made = (
        Generated() if judged is None else Generated(ties=judged.ties, unanswered=judged.unanswered)
    )
    with whole_file(path) as file:
        for sample in samples:
            chosen = (
                judged.records.get(sample.number, [])
                if judged
                else kept_records(sample, config, config.seed)
            )
            for record in chosen:
                line = (
                    json.dumps(record | sample.template_fields, ensure_ascii=False, allow_nan=False)
                    + "\n"
                )
                file.write(line.encode())
            kept += [
                record[name] for record in chosen for name in ("margin", "reward") if name in record
            ]
            made.records += len(chosen)
            made.prompts += 1
            made.prompts_kept += bool(chosen)
            made.responses += len(sample.responses)
            rewards += sample.rewards
            ends = [turns[-1]["text"] for turns in sample.turns] or sample.responses
            made.empty += sum(not text.strip() for text in ends)
            ends_back = zip(ends, sample.read_back, strict=True)
            made.not_read_back += sum(bool(text.strip()) and not back for text, back in ends_back)
            made.unfinished += len(sample.finished) - sum(sample.finished)
        if not made.records and config.keep != NOTHING:
            decided = (
                f"rewards go from {min(rewards):.4g} to {max(rewards):.4g}, " if rewards else ""
            )
            decided += (
                f"{made.ties} pairs are tied and {made.unanswered} without a verdict, "
                if judged
                else ""
            )
            raise UserError(
                f"nothing of {made.responses} responses is kept by --keep {config.keep}: {decided}{made.unfinished} "
                f"responses have no end-of-sequence, {made.empty} no text, and {made.not_read_back} would be other "
                f"tokens as data. All are in {samples.path}: --resume with other settings keeps others"
            )
    made.mean_reward, made.mean_kept = (
        fmean(values) if values else None for values in (rewards, kept)
    )
    return made


def summary(generated: Generated, config: GenerateConfig, path: Path) -> str:
    g = generated
    speed = f", {g.tokens_per_second:.0f} tokens per second" if g.tokens_per_second else ""
    reward = "" if g.mean_reward is None else f", mean reward {g.mean_reward:.4g}"
    unfinished = "cut at a limit" + ("" if config.keep_unfinished else " and left out")
    kept = (
        ""
        if g.mean_kept is None
        else f", mean {'margin' if config.keep in PAIRS else 'reward'} {g.mean_kept:.4g}"
    )
    judged = (
        f"; {g.ties} tied and {g.unanswered} without a verdict, left out"
        if config.keep == JUDGED
        else ""
    )
    others = (
        f", {g.not_read_back} that as data would be other tokens than were sampled"
        if g.not_read_back and config.keep != NOTHING
        else ""
    )
    return (
        f"{g.responses} responses to {g.prompts} prompts{reward}{speed}; {g.unfinished} {unfinished}, {g.empty} "
        f"without text{others} and left out\n"
        f"{path} ({config.keep}): {g.records} {'pairs' if config.keep in PAIRS else 'responses'} of "
        f"{g.prompts_kept} prompts{kept}{judged}"
    )
