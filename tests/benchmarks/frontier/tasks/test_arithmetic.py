"""Sums that are added up step by step."""

import numpy as np

from benchmarks.frontier.runs import arithmetic as runs
from benchmarks.frontier.runs.plan import Run
from benchmarks.frontier.tasks import arithmetic
from benchmarks.frontier.tasks.synthetic import make_model, make_tokenizer, write_jsonl


def test_steps_end_with_the_sum_unless_the_teacher_slips(monkeypatch):
    prompt, rng = arithmetic.make_prompt([37, 45, 19, 99]), np.random.default_rng(0)
    assert (
        0.3
        < np.mean([arithmetic.is_right(prompt, arithmetic.steps(prompt, rng)) for _ in range(400)])
        < 0.55
    )
    monkeypatch.setattr(arithmetic, "SLIPS", 0.0)
    written = arithmetic.steps(prompt, rng)
    assert " B 5 + 7 = 1 2 , b 4 + 3 + 1 = 0 8 , 0 8 2 ; " in written
    assert len(written.split()) == 69
    assert arithmetic.is_right(prompt, written)
    assert not arithmetic.is_right(prompt, written[:-3] + "9 ;")


def test_a_run_is_recorded(tmp_path, monkeypatch):
    tokenizer, policy = make_tokenizer(arithmetic.VOCABULARY), tmp_path / "start-0" / "policy"
    tokenizer.save_pretrained(policy)
    make_model(tokenizer, 0).save_pretrained(policy)
    for part in ("train", "eval"):
        write_jsonl(
            policy.parent / f"prompts.{part}.jsonl",
            [{"prompt": arithmetic.make_prompt([12, 34, 56, 78])}] * 8,
        )
    monkeypatch.setattr(runs, "EVALUATED_AT", "1")
    run = Run(
        "arithmetic", "joint", 1e-3, 0.0, 0, prompts_per_update=8, responses_per_prompt=2, updates=2
    )
    record = runs.train_and_record(run, tmp_path)
    assert [one["step"] for one in record["evaluations"]] == [0, 1, 2]
    assert record["course"]["tied_prompts"] == [1.0]
