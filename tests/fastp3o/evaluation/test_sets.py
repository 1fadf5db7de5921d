"""Several sets of evaluation data, and the likeliest responses."""

from pathlib import Path

import pytest

from fastp3o import P3OConfig, UserError, train
from fastp3o.sources import InMemory
from fastp3o.training.setup import evaluation_sets
from tests.fastp3o.runs import config, metrics, records


def test_each_set_has_means_of_its_own_and_all_of_them_together_have_todays(tiny_model, workplace):
    prompts = records("prompts")
    settings = {"updates": 1, "eval_responses_per_prompt": 2}
    train(config(tiny_model, "one", P3OConfig, eval_prompts="prompts.jsonl", **settings))
    result = train(
        config(
            tiny_model,
            "two",
            P3OConfig,
            eval_greedy=True,
            keep_best="set/last/greedy/reward",
            **settings,
        ),
        eval_prompts={"first": prompts[:3], "last": prompts[3:]},
    )
    assert result.best_model is not None
    for one, two in zip(metrics("one", "eval.jsonl"), metrics("two", "eval.jsonl"), strict=True):
        assert two == {**two, **one}
        first, last = two["set/first/reward"], two["set/last/reward"]
        assert (3 * first + 5 * last) / 8 == pytest.approx(two["reward"])
        assert (two["set/first/prompts"], two["set/last/prompts"]) == (3, 5)
        greedy = (3 * two["set/first/greedy/reward"] + 5 * two["set/last/greedy/reward"]) / 8
        assert greedy == pytest.approx(two["greedy/reward"])
    # A model that has learned nothing yet repeats itself where it takes the most likely token.
    assert metrics("two", "eval.jsonl")[0]["greedy/response_length"] == 6


def test_sets_are_named_sources_and_a_source_with_an_equals_sign_is_none(workplace):
    named = InMemory("<eval_data>", {"a": "b.jsonl"})
    assert evaluation_sets("easy=a.jsonl,b.jsonl,hard=c/*.jsonl") == {
        "easy": "a.jsonl,b.jsonl",
        "hard": "c/*.jsonl",
    }
    assert evaluation_sets(named) == {"a": "b.jsonl"}
    Path("a=b.jsonl").write_text("")
    for source in ("a.jsonl,b.jsonl", "data/split=test/*.parquet", "a=b.jsonl"):
        assert evaluation_sets(source) == {"": source}
    with pytest.raises(UserError, match="different names"):
        evaluation_sets("a=b.jsonl,a=c.jsonl")
