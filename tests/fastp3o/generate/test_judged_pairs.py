"""Preferences from a judge's verdicts: the pairs that it is asked about, what is kept, what a resumed run asks."""

from pathlib import Path

import pytest

from fastp3o.data.loading import load_preferences
from fastp3o.errors import UserError
from fastp3o.evaluation import judge as judges
from fastp3o.evaluation.verdicts import Verdict
from fastp3o.generate.loop import generate
from fastp3o.generate.samples import Samples
from fastp3o.generate.selection import judged_records, plain_text
from tests.fastp3o.evaluation.test_judge import JUDGES, prefers_the_longer, question
from tests.fastp3o.generate.test_generate import config, records
from tests.fastp3o.local_server import Reply, serving

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


def test_an_endpoints_verdicts_are_kept_and_not_asked_for_again(workplace, tiny_model, monkeypatch):
    """It is asked in both orders; after it has failed, a resumed run samples nothing and asks for the rest."""
    endpoint = judges.ChatEndpoint
    monkeypatch.setattr(judges, "ChatEndpoint", lambda url, model: endpoint(url, model, timeout=5.0, retries=0))

    def run(reply, **changes):
        """What is generated, and the number of requests."""
        with serving("/v1/chat/completions", reply, question) as server:
            url = server.url.removesuffix("/chat/completions")
            served = {"judge_url": url, "judge_model": "m", "judge_requests": 1, **JUDGED}
            return generate(config(tiny_model, "run", **served, **changes)), len(server.requests)

    def fails_after_nine(asked):
        return Reply(500) if asked.number > 9 else prefers_the_longer(asked)

    with pytest.raises(UserError, match="--resume asks for the verdicts that are missing"):
        run(fails_after_nine)
    sampled, kept = Path("run/samples.jsonl").read_bytes(), Path("run/verdicts.jsonl").read_text().splitlines()
    done, asked = run(prefers_the_longer, resume=True)
    all_verdicts = Path("run/verdicts.jsonl").read_text().splitlines()
    assert len(kept) == 4
    assert Path("run/samples.jsonl").read_bytes() == sampled
    assert all_verdicts[:4] == kept
    assert asked == 2 * (len(all_verdicts) - 4)
    assert done.records == len(records("run"))
    assert all(len(line["chosen"]) > len(line["rejected"]) for line in records("run"))
