"""Preferences from a judge's verdicts: the pairs that it is asked about, what is kept, what a resumed run asks."""

from pathlib import Path

import pytest

from fastp3o.cli import parse
from fastp3o.data.loading import load_preferences
from fastp3o.endpoint import EndpointError
from fastp3o.evaluation import judge as judges
from fastp3o.evaluation.verdicts import Verdict
from fastp3o.generate.config import GenerateConfig
from fastp3o.generate.loop import generate
from fastp3o.generate.samples import Samples
from fastp3o.generate.selection import judged_records, plain_text
from fastp3o.objectives.preferences import DPOConfig
from fastp3o.training.preferences import train as train_preference
from tests.fastp3o.evaluation.test_judge import prefers_the_longer, question, says
from tests.fastp3o.generate.test_generate import config, records
from tests.fastp3o.local_server import Reply, serving

JUDGE = """
def longer(prompts, firsts, seconds):
    return ["first" if len(a) > len(b) else "second" if len(b) > len(a) else "tie" for a, b in zip(firsts, seconds)]

def silent(prompts, firsts, seconds):
    return ["none"] * len(prompts)
"""
JUDGED = {"keep": "judged", "reward": None}


@pytest.fixture
def judging(workplace, monkeypatch):
    """The workplace with judges, and with endpoints that are given up soon."""
    (workplace / "judges_of_pairs.py").write_text(JUDGE)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    patience = {"timeout": 5.0, "retries": 0}
    monkeypatch.setattr(
        judges, "ChatEndpoint", lambda url, model, made=judges.ChatEndpoint: made(url, model, **patience)
    )


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
    again = judged_records(given, judge, unfinished=False, seed=1)
    assert again == judged
    before = len(asked)
    judged_records(given, judge, unfinished=True, seed=1)
    assert {text for _, *texts in asked[before + 8 :] for text in texts} == {"x", "y"}


def test_a_judge_reads_messages_as_text():
    system, user = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Say tree:"}
    assert plain_text("Say tree:") == plain_text([user]) == "Say tree:"
    assert plain_text([system, user]) == "system: Be brief.\n\nuser: Say tree:"


def test_judged_pairs_train_dpo(judging, tiny_model, tokenizer, capsys):
    done = generate(config(tiny_model, "judged", judge="judges_of_pairs:longer", **JUDGED))
    lines = records("judged")
    assert done.records == len(lines) > 4
    assert (done.mean_reward, done.mean_kept) == (None, None)
    assert done.records + done.ties == 16
    assert all(len(line["chosen"]) > len(line["rejected"]) for line in lines)
    assert f"{done.ties} tied and 0 without a verdict, left out" in " ".join(capsys.readouterr().out.split())
    assert all(line["rewards"] == [] for line in records("judged", "samples.jsonl"))
    examples, _ = load_preferences("judged/kept.jsonl", tokenizer, max_prompt_tokens=32, max_response_tokens=32)
    assert len(examples) == done.records
    train_preference(DPOConfig(model=tiny_model, train_data="judged/kept.jsonl", output_dir="dpo", report_to="none"))


def test_an_endpoints_verdicts_are_kept_and_not_asked_for_again(judging, tiny_model):
    """It is asked in both orders; after it has failed, a resumed run samples nothing and asks for the rest."""

    def fails_after_nine(asked):
        return Reply(500) if asked.number > 9 else prefers_the_longer(asked)

    served = {"judge_model": "m", "judge_requests": 1, **JUDGED}
    with serving("/v1/chat/completions", fails_after_nine, question) as server:
        url = server.url.removesuffix("/chat/completions")
        with pytest.raises(EndpointError, match="--resume asks for the verdicts that are missing"):
            generate(config(tiny_model, "run", judge_url=url, **served))
    kept = Path("run/verdicts.jsonl").read_text().splitlines()
    assert len(kept) == 4
    sampled = Path("run/samples.jsonl").read_bytes()
    with serving("/v1/chat/completions", prefers_the_longer, question) as server:
        url = server.url.removesuffix("/chat/completions")
        done = generate(config(tiny_model, "run", judge_url=url, resume=True, **served))
        asked = len(server.requests)
    assert Path("run/samples.jsonl").read_bytes() == sampled
    assert Path("run/verdicts.jsonl").read_text().splitlines()[:4] == kept
    different = len(Path("run/verdicts.jsonl").read_text().splitlines())
    assert asked == 2 * (different - 4)
    assert done.records == len(records("run"))
    chosen, rejected = ([line[name] for line in records("run")] for name in ("chosen", "rejected"))
    assert all(len(a) > len(b) for a, b in zip(chosen, rejected, strict=True))


def test_answers_that_depend_on_the_order_are_ties_and_unusable_ones_are_left_out(judging, tiny_model):
    def first_or_nothing(asked):
        return Reply(body=says("[[A]]" if "tree" in asked.prompt else "no idea"))

    with serving("/v1/chat/completions", first_or_nothing, question) as server:
        url = server.url.removesuffix("/chat/completions")
        with pytest.raises(ValueError, match=r"2 pairs are tied and 14 without a verdict") as refused:
            generate(config(tiny_model, "run", judge_url=url, judge_model="m", **JUDGED))
    assert "--resume with other settings keeps others" in str(refused.value)


def test_a_judge_that_is_not_there_is_found_out_before_anything_is_sampled(judging, tiny_model):
    with pytest.raises(ValueError, match="cannot load the judge 'nosuch_module:f'"):
        generate(config(tiny_model, "run", judge="nosuch_module:f", **JUDGED))
    assert not Path("run").exists()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--keep best", "--keep best keeps responses by their rewards: give --reward"),
        ("--keep judged", "--keep judged asks a judge: give --judge, or --judge_url with --judge_model"),
        ("--keep best --reward r --judge m:f", "--judge does nothing without --keep judged"),
        ("--keep judged --judge m:f --responses_per_prompt 1", "--responses_per_prompt must be at least 2 for pairs"),
        ("--keep judged --judge_url http://a", "--judge_url and --judge_model go together"),
        ("--keep judged --judge m:f --min_gap 1", "--min_gap does nothing without --keep rs_dpo"),
    ],
)
def test_flags_that_do_not_go_together_are_refused(capsys, flags, message):
    with pytest.raises(SystemExit):
        parse(GenerateConfig, ["--model", "m", "--prompts", "p", "--output_dir", "o", *flags.split()])
    assert message in " ".join(capsys.readouterr().err.split())
