"""Makes comparisons for reward models of a clone of AlpacaEval: two language models' answers to one
instruction, and how sure a judge, GPT-4, is of its choice. The code of
https://github.com/tatsu-lab/alpaca_eval is under Apache 2.0; its data are under CC BY-NC 4.0, for
research alone, and the answers are also under the terms of the models that wrote them.

    git clone https://github.com/tatsu-lab/alpaca_eval runs/alpaca_eval/clone
    python scripts/make_alpaca_eval.py --clone runs/alpaca_eval/clone --output_dir runs/alpaca_eval/data

train.jsonl and held_out.jsonl have the fields `chosen`, `rejected` and `probability`, and share no
instruction. train_hard.jsonl is train.jsonl with the judge's choices alone, without how sure it is.

Half of the comparisons are with text_davinci_003 and have hard labels (AlpacaEval 1), half are with
gpt4_1106_preview and have soft labels (AlpacaEval 2). Only short answers are taken, at random. Those
of gpt4_1106_preview are long: few instructions are left in the second half, and each of them comes
several times, with the answers of different models.
"""

import json
import random
import subprocess
from collections.abc import Iterator
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any, NamedTuple

from make_human_preferences import ASSISTANT, HUMAN

from fastp3o.cli import parse
from fastp3o.config import Flags, option, required
from fastp3o.errors import UserError
from fastp3o.script import run_script

# Hard labels against text-davinci-003, and soft ones against gpt4_1106_preview.
JUDGES = "alpaca_eval_gpt4", "weighted_alpaca_eval_gpt4_turbo"
# Their answers were written to mislead the judge.
EXCLUDED = "NullModel", "gpt4_gamed"


class AlpacaEvalConfig(Flags):
    """Where the comparisons come from, how many each set gets, and how long they may be."""

    clone: str = required(
        "Folder of a clone of AlpacaEval, or a bare one. Files that it lacks are counted."
    )
    output_dir: str = required("Folder for the three JSON Lines files.")
    comparisons: int = option(
        320, "Number of comparisons to train on, half of them of each judge.", at_least=2
    )
    held_out: int = option(
        256, "Number of comparisons that are held out, half of them of each judge.", at_least=2
    )
    held_out_share: float = option(
        0.4, "Share of the instructions whose comparisons may be held out.", above=0, below=1
    )
    prompt_characters: int = option(
        250, "Maximum length of an instruction, in characters.", at_least=1
    )
    answer_characters: int = option(450, "Maximum length of an answer, in characters.", at_least=1)
    seed: int = option(0, "Seed of the split and of the choice of comparisons.", at_least=0)


class Comparison(NamedTuple):
    """Answers of two models to an instruction. probability: that the second one is better."""

    instruction: str
    judge: str
    answers: tuple[str, str]
    models: tuple[str, str]
    probability: float

    def record(self, hard: bool = False) -> dict[str, Any]:
        """A line of the data. hard: of the judge's choice alone. A tie stays one."""
        better = int(self.probability >= 0.5)
        probability = max(self.probability, 1 - self.probability)
        if hard and probability > 0.5:
            probability = 1.0
        return {
            "prompt": f"{HUMAN} {self.instruction}{ASSISTANT}",
            "chosen": f" {self.answers[better]}",
            "rejected": f" {self.answers[1 - better]}",
            "probability": probability,
            "judge": self.judge,
            "chosen_model": self.models[better],
            "rejected_model": self.models[1 - better],
        }


def main(config: AlpacaEvalConfig) -> None:
    everything = list(read(config.clone))
    fitting = [one for one in everything if fits(one, config)]
    sets = split(fitting, config)
    folder = Path(config.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    for name, comparisons in sets.items():
        write(folder / f"{name}.jsonl", [one.record() for one in comparisons])
    write(folder / "train_hard.jsonl", [one.record(hard=True) for one in sets["train"]])
    print(f"{len(everything)} comparisons, {len(fitting)} of them short enough")
    for name, comparisons in sets.items():
        print(f"{name}.jsonl: {', '.join(described(comparisons, judge) for judge in JUDGES)}")


def described(comparisons: list[Comparison], judge: str) -> str:
    instructions = [one.instruction for one in comparisons if one.judge == judge]
    return f"{len(instructions)} by {judge} on {len(set(instructions))} instructions"


def read(clone: str) -> Iterator[Comparison]:
    """Comparisons of two different answers, neither empty, each once. Raises UserError if the clone has none."""
    listed = git(clone, "ls-tree", "-rz", "--name-only", "HEAD", "results/")
    if listed is None:
        raise UserError(f"{clone} is not a clone of AlpacaEval: git finds no commit in it")
    wanted = [path for path in listed.split("\0") if path.endswith("/annotations.json")]
    wanted = [
        path
        for path in wanted
        if path.split("/")[2] in JUDGES and path.split("/")[1] not in EXCLUDED
    ]
    files = {path: git(clone, "cat-file", "blob", f"HEAD:{path}") for path in wanted}
    lacking = sum(content is None for content in files.values())
    if lacking == len(files):
        raise UserError(f"{clone} has no annotations.json of {' or '.join(JUDGES)} in results/")
    print(f"{len(files) - lacking} files of annotations, {lacking} that the clone lacks")
    seen = set()
    for path, content in files.items():
        for number, annotation in enumerate(json.loads(content or "[]")):
            one = comparison(annotation, f"{path}, entry {number}")
            if (
                one
                and one.judge in JUDGES
                and (one.instruction, one.judge, one.answers) not in seen
            ):
                seen.add((one.instruction, one.judge, one.answers))
                yield one


def git(clone: str, *arguments: str) -> str | None:
    """What git prints; None if it fails."""
    try:
        found = subprocess.run(["git", "-C", clone, *arguments], capture_output=True, check=True)
    except FileNotFoundError:
        raise UserError("git is needed to read a clone, and is not on the PATH") from None
    except subprocess.CalledProcessError:
        return None
    return found.stdout.decode()


def comparison(annotation: dict[str, Any], where: str) -> Comparison | None:
    """None without a verdict, or of answers that are empty or the same. `preference` is 1 if the first answer is
    better, 2 if the second one is, and 1.5, in older files 0, for a tie. Raises UserError for any other."""
    preference = annotation["preference"]
    first, second = answers = annotation["output_1"].strip(), annotation["output_2"].strip()
    if preference is None or not first or not second or first == second:
        return None
    if not (1 <= preference <= 2 or preference == 0):
        raise UserError(
            f"{where}: preference is {preference}, expected a number from 1 to 2, or 0 for a tie"
        )
    return Comparison(
        annotation["instruction"].strip(),
        # The folder of a model's results names the judge that was asked for, the annotation the one that answered.
        annotation["annotator"],
        answers,
        (annotation["generator_1"], annotation["generator_2"]),
        0.5 if preference == 0 else preference - 1,
    )


def fits(one: Comparison, config: AlpacaEvalConfig) -> bool:
    short = all(len(answer) <= config.answer_characters for answer in one.answers)
    return short and len(one.instruction) <= config.prompt_characters


def split(comparisons: list[Comparison], config: AlpacaEvalConfig) -> dict[str, list[Comparison]]:
    """Two sets of these sizes, which share no instruction. Raises UserError if there are too few."""
    shuffled = random.Random(config.seed)
    instructions = sorted({one.instruction for one in comparisons})
    shuffled.shuffle(instructions)
    held_out = set(instructions[: round(config.held_out_share * len(instructions))])
    sets: dict[str, list[Comparison]] = {}
    for name, number in (("train", config.comparisons), ("held_out", config.held_out)):
        sets[name] = []
        for place, judge in enumerate(JUDGES):
            of_set = [
                one
                for one in comparisons
                if one.judge == judge and (one.instruction in held_out) == (name == "held_out")
            ]
            wanted = (number + place) // 2
            if len(of_set) < wanted:
                raise UserError(
                    f"{len(of_set)} comparisons of {judge} are too few for {wanted} in {name}.jsonl: longer answers "
                    "(--answer_characters), another --held_out_share or fewer comparisons would do"
                )
            sets[name] += drawn(of_set, wanted, shuffled)
        shuffled.shuffle(sets[name])
    return sets


def drawn(comparisons: list[Comparison], number: int, shuffled: random.Random) -> list[Comparison]:
    """So many of them, at random, of as many instructions as there are: none comes twice before each has come once."""
    by_instruction: dict[str, list[Comparison]] = {}
    for one in shuffled.sample(comparisons, len(comparisons)):
        by_instruction.setdefault(one.instruction, []).append(one)
    in_turns = (
        one for turn in zip_longest(*by_instruction.values()) for one in turn if one is not None
    )
    return list(islice(in_turns, number))


def write(path: Path, records: list[dict[str, Any]]) -> None:
    with path.open("w", encoding="utf-8") as file:
        for record in records:
            file.write(json.dumps(record, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    run_script(lambda: main(parse(AlpacaEvalConfig)))
