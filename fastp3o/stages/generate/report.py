"""Writes the samples that are kept, and sums up the run."""

import json
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from fastp3o.errors import UserError
from fastp3o.stages.generate.config import PAIRS, GenerateConfig
from fastp3o.stages.generate.samples import SamplesFile
from fastp3o.stages.generate.selection import kept_records
from fastp3o.training.durable import whole_file


class Generated(NamedTuple):
    """The summary of a run.

    prompts, responses, mean_reward, empty, unfinished: over all samples, also those before a run was resumed. records:
    number kept. prompts_kept: prompts that have one. mean_kept: their mean reward, for pairs the mean margin.
    tokens_per_second: sampled since the start, without the time of rewards; 0 if nothing was left to sample.
    """

    prompts: int
    responses: int
    mean_reward: float
    empty: int
    unfinished: int
    records: int
    prompts_kept: int
    mean_kept: float
    tokens_per_second: float = 0.0


def write_kept(config: GenerateConfig, samples: SamplesFile, path: Path) -> Generated:
    """Writes the records that are kept, in the order of the prompts. Raises UserError if there are none."""
    rewards, kept = [], []
    prompts = with_records = empty = unfinished = 0
    with whole_file(path) as file:
        for one in samples:
            records = kept_records(one, config, config.seed)
            for record in records:
                file.write(json.dumps(record, ensure_ascii=False, allow_nan=False).encode() + b"\n")
                kept.append(record["margin" if config.keep in PAIRS else "reward"])
            prompts += 1
            with_records += bool(records)
            rewards += one.rewards
            empty += sum(not text.strip() for text in one.responses)
            unfinished += len(one.finished) - sum(one.finished)
        if not kept:
            raise UserError(
                f"nothing of {len(rewards)} responses is kept by --keep {config.keep}: rewards go from "
                f"{min(rewards):.4g} to {max(rewards):.4g}, {unfinished} responses have no end-of-sequence and {empty} "
                f"no text. All are in {samples.path}: --resume with other settings keeps others"
            )
    return Generated(prompts, len(rewards), fmean(rewards), empty, unfinished, len(kept), with_records, fmean(kept))


def summary(generated: Generated, config: GenerateConfig, path: Path) -> str:
    g = generated
    speed = f", {g.tokens_per_second:.0f} tokens per second" if g.tokens_per_second else ""
    unfinished = "cut at --max_response_tokens" + ("" if config.keep_unfinished else " and left out")
    return (
        f"{g.responses} responses to {g.prompts} prompts, mean reward {g.mean_reward:.4g}{speed}; {g.unfinished} "
        f"{unfinished}, {g.empty} without text and left out\n"
        f"{path} ({config.keep}): {g.records} {'pairs' if config.keep in PAIRS else 'responses'} of "
        f"{g.prompts_kept} prompts, mean {'margin' if config.keep in PAIRS else 'reward'} {g.mean_kept:.4g}"
    )
