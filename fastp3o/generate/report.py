"""Writes the samples that are kept, and sums up the run."""

import json
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from fastp3o.errors import UserError
from fastp3o.evaluation.config import JudgeConfig
from fastp3o.evaluation.judge import load_judge
from fastp3o.files import whole_file
from fastp3o.generate.config import JUDGED, NOTHING, PAIRS, SelectionConfig
from fastp3o.generate.samples import Samples, SamplesFile
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

    def count(self, sample: Samples, records: int) -> None:
        """Adds the responses to a prompt, of which so many records are kept."""
        self.prompts += 1
        self.prompts_kept += records > 0
        self.records += records
        self.responses += len(sample.responses)
        self.unfinished += sample.finished.count(False)
        # Of several turns the last one tells.
        texts = [turns[-1]["text"] for turns in sample.turns] or sample.responses
        for text, read_back in zip(texts, sample.read_back, strict=True):
            is_empty = not text.strip()
            self.empty += is_empty
            self.not_read_back += not is_empty and not read_back


def write_kept(
    selection: SelectionConfig, judging: JudgeConfig, samples: SamplesFile, path: Path, *, seed: int
) -> Generated:
    """Writes the records that are kept, in the order of the prompts. Raises UserError if there are
    none.
    """
    generated, judged = Generated(), None
    if selection.keep == JUDGED:
        judged = by_judge(selection, judging, samples, seed=seed)
        generated = Generated(ties=judged.ties, unanswered=judged.unanswered)
    rewards, kept = [], []
    with whole_file(path) as file:
        for sample in samples:
            records = (
                kept_records(sample, selection, seed)
                if judged is None
                else judged.records.get(sample.number, [])
            )
            for record in records:
                fields = record | sample.template_fields
                line = json.dumps(fields, ensure_ascii=False, allow_nan=False) + "\n"
                file.write(line.encode())
                kept += [record[name] for name in ("margin", "reward") if name in record]
            generated.count(sample, len(records))
            rewards += sample.rewards
        # Raised within, so that no empty file is left.
        if not generated.records and selection.keep != NOTHING:
            raise UserError(nothing_kept(generated, selection, rewards, samples.path))
    generated.mean_reward = fmean(rewards) if rewards else None
    generated.mean_kept = fmean(kept) if kept else None
    return generated


def by_judge(
    selection: SelectionConfig, judging: JudgeConfig, samples: SamplesFile, *, seed: int
) -> Judged:
    """The records that the judge decides. An endpoint's verdicts are kept beside the samples, or in
    --verdicts.
    """
    verdicts = Path(judging.verdicts) if judging.verdicts else samples.path.with_name(VERDICTS)
    judge = load_judge(judging, verdicts)
    assert judge is not None
    return judged_records(samples, judge, unfinished=selection.keep_unfinished, seed=seed)


def nothing_kept(
    generated: Generated, selection: SelectionConfig, rewards: list[float], path: Path
) -> str:
    """The error where nothing is kept, with what may explain it. path: of the samples."""
    decided = ""
    if rewards:
        decided = f"rewards go from {min(rewards):.4g} to {max(rewards):.4g}, "
    if selection.keep == JUDGED:
        decided += f"{generated.ties} pairs are tied and {generated.unanswered} without a verdict, "
    return (
        f"nothing of {generated.responses} responses is kept by --keep {selection.keep}: {decided}"
        f"{generated.unfinished} responses have no end-of-sequence, {generated.empty} no text, and "
        f"{generated.not_read_back} would be other tokens as data. All are in {path}: --resume with "
        "other settings keeps others"
    )


def summary(generated: Generated, selection: SelectionConfig, path: Path) -> str:
    """Two lines about the run: what was sampled, and what of it is in the file at `path`."""
    g = generated
    speed = f", {g.tokens_per_second:.0f} tokens per second" if g.tokens_per_second else ""
    reward = "" if g.mean_reward is None else f", mean reward {g.mean_reward:.4g}"
    left_out = "" if selection.keep_unfinished else " and left out"
    others = ""
    if g.not_read_back and selection.keep != NOTHING:
        others = f", {g.not_read_back} that as data would be other tokens than were sampled"
    sampled = (
        f"{g.responses} responses to {g.prompts} prompts{reward}{speed}; {g.unfinished} cut at a "
        f"limit{left_out}, {g.empty} without text{others} and left out"
    )

    records, value = "responses", "reward"
    if selection.keep in PAIRS:
        records, value = "pairs", "margin"
    mean = "" if g.mean_kept is None else f", mean {value} {g.mean_kept:.4g}"
    undecided = ""
    if selection.keep == JUDGED:
        undecided = f"; {g.ties} tied and {g.unanswered} without a verdict, left out"
    kept = (
        f"{path} ({selection.keep}): {g.records} {records} of {g.prompts_kept} prompts"
        f"{mean}{undecided}"
    )
    return f"{sampled}\n{kept}"
