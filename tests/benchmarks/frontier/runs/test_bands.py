"""Bands by length: from a judge to its record, and what the page reads of it."""

import json

import pytest
import torch

from benchmarks.frontier.report import bands as report
from benchmarks.frontier.runs import bands, bands_real
from benchmarks.frontier.runs.records import lines_of
from benchmarks.frontier.tasks.synthetic import make_model, make_tokenizer, write_jsonl


@pytest.fixture
def policy(tmp_path):
    """An untrained start of the languages, seed 0."""
    tokenizer, start = make_tokenizer(), tmp_path / "start-languages-0"
    tokenizer.save_pretrained(start / "policy")
    make_model(tokenizer, 0).save_pretrained(start / "policy")
    for part in ("train", "eval"):
        prompts = [{"prompt": f"topic1 style2 w001 w002 w003 w00{n}"} for n in range(8)]
        write_jsonl(start / f"prompts.{part}.jsonl", prompts)
    return start / "policy"


def test_a_run_is_recorded_and_the_page_reads_it(policy, tmp_path, monkeypatch):
    small = {"updates": 4, "prompts_per_update": 4, "prompts_per_minibatch": 2, "eval_at": "1"}
    judge = bands.JUDGES["languages"]
    changed = judge._replace(settings=judge.settings | small)
    monkeypatch.setitem(bands.JUDGES, "languages", changed)
    monkeypatch.setattr(bands, "RECORD", tmp_path / "bands.jsonl")
    for arm in ("fixed", "means"):
        line = bands.play("languages", arm, 0, tmp_path, tmp_path)
        assert [one["step"] for one in line["evaluations"]] == [0, 1, 4]
        with bands.RECORD.open("a") as file:
            file.write(json.dumps(line) + "\n")
    rows = report.table()[1:]
    assert [row[2] for row in rows] == ["fixed", "means"]
    last = line["evaluations"][-1]
    assert report.result(line) == last["gold"] - 0.03 * last["kl"]
    assert all(0 <= float(row[4]) <= 1 for row in rows)


def test_a_step_on_a_model_moves_responses_as_their_rewards_say(policy, tmp_path, monkeypatch):
    monkeypatch.setattr(bands_real, "RECORD", tmp_path / "real.jsonl")
    monkeypatch.setattr(bands_real, "PROMPTS", ("topic1 style2 w001", "topic3 style0 w050"))
    monkeypatch.setattr(bands_real, "TOKENS", 16)
    monkeypatch.setattr(bands_real, "LENGTHS", (4, 16))
    monkeypatch.setattr(bands_real, "STEPS", (1e-5, 1e-3))
    monkeypatch.setattr("sys.argv", ["bands_real", "--model", str(policy)])
    bands_real.main()
    lines = lines_of(bands_real.RECORD)
    assert [line["step"] for line in lines] == [1e-5, 1e-3]
    rewards = torch.tensor(lines[0]["rewards"])
    whole = [torch.tensor(line["log_ratios"])[:, 1].view(2, 4) for line in lines]
    gains = [((rewards - rewards.mean(1, keepdim=True)) * one).sum() for one in whole]
    assert gains[0] > 0
    assert 50 * gains[0] < gains[1] < 200 * gains[0]
    bands_real.main()
    assert len(lines_of(bands_real.RECORD)) == 2


def test_shares_of_a_real_model_are_those_of_all_ordered_pairs():
    line = {
        **{"rewards": [[1.0, 0.0, 0.0]], "lengths": [128, 128, 8]},
        "log_ratios": [[0.1, 0, 0, 0.5], [0, 0, 0, -0.1], [0.15, 0.15, 0.15, 0.15]],
    }
    # 16 and 128 tokens: of (0.1, −0.1), (0, 0.5), (0.1, 0.15), (0.15, 0.5), (0, 0.15), (0.15, −0.1)
    outside, left = report.clipped(line, "fixed", 16, 128)
    assert outside == pytest.approx(3 / 6)
    # (0, 0.5) and (0.15, 0.5) moved as their rewards say; (0.15, −0.1) has equal ones.
    assert left == pytest.approx(4 / 6)
    # Bands of √72 / 4 · 0.2 = 0.42 with both whole, of √68/16 with the response of 8 tokens.
    assert report.clipped(line, "root band", 16, 128)[0] == pytest.approx(1 / 6)
