"""Preferences from a judge's verdicts: the pairs that it is asked about, what is kept, what a resumed run asks."""

from pathlib import Path

from fastp3o.data.loading import load_preferences
from fastp3o.evaluation.verdicts import Verdict
from fastp3o.generate.loop import generate
from fastp3o.generate.samples import Samples
from fastp3o.generate.selection import judged_records, plain_text
from tests.fastp3o.evaluation.test_judge import JUDGES
from tests.fastp3o.generate.test_generate import config, records

JUDGED = {"keep": "judged", "reward": None}


def samples(number, prompt, responses, finished=None) -> Samples:
    return Samples(number, prompt, {}, responses, [3] * len(responses), finished or [True] * len(responses), [])


def test_each_response_is_in_one_pair_and_the_better_one_is_chosen():
    asked = []

    def judge(prompts, firsts, seconds):
        asked.extend(zip(prompts, firsts, seconds, strict=True))
        order = [Verdict.FIRST, Verdict.SECOND, Verdict.TIE, Verdict.NONE]
        return [order[number % 4] for number in range(len(prompts))]

    given = [samples(number, f"p{number}", ["a", "b", "c", "d"]) for number in range(4)]
    given.append(samples(4, "same", ["x", " x "]))
    given.append(samples(5, "cut", ["x", "y", ""], [True, False, True]))
    judged = judged_records(given, judge, unfinished=False, seed=1)
    assert len(asked) == 8  # two pairs of four responses, and none of "same" and "cut"
    for number in range(4):
        assert sorted(text for prompt, *texts in asked if prompt == f"p{number}" for text in texts) == list("abcd")
    assert (judged.ties, judged.unanswered) == (2, 2)
    (_, first, second), (_, third, fourth) = asked[:2]
    assert judged.records[0] == [
        {"prompt": "p0", "chosen": first, "rejected": second},
        {"prompt": "p0", "chosen": fourth, "rejected": third},
    ]
    assert sum(map(len, judged.records.values())) == 4
    assert judged_records(given, judge, unfinished=False, seed=1) == judged
    before = len(asked)
    judged_records(given, judge, unfinished=True, seed=1)
    assert {text for _, *texts in asked[before + 8 :] for text in texts} == {"x", "y"}
    # A judge reads messages as text.
    system, user = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Say tree:"}
    assert plain_text("Say tree:") == plain_text([user]) == "Say tree:"
    assert plain_text([system, user]) == "system: Be brief.\n\nuser: Say tree:"


def test_judged_pairs_load_as_preferences(workplace, tiny_model, tokenizer):
    Path("judges_by_length.py").write_text(JUDGES)
    done = generate(config(tiny_model, "judged", judge="judges_by_length:longer", **JUDGED))
    lines = records("judged")
    assert done.records == len(lines) > 4
    assert done.records + done.ties == 16
    assert all(len(line["chosen"]) > len(line["rejected"]) for line in lines)
    examples, _ = load_preferences("judged/kept.jsonl", tokenizer, max_prompt_tokens=32, max_response_tokens=32)
    assert len(examples) == done.records
