"""Film reviews for a real model: no sentence in two sets, no other files than those that are meant,
and a gold that follows words alone.
"""

import hashlib
import importlib
import json
import math
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import numpy as np
import pytest

from fastp3o.errors import UserError
from tests.scripts.test_made_data import SCRIPTS, records

LABELS = {"rt-polarity.pos": "fine", "rt-polarity.neg": "dull"}


@pytest.fixture
def script(monkeypatch):
    """Imports a script by its name."""
    monkeypatch.syspath_prepend(SCRIPTS)
    return importlib.import_module


@pytest.fixture
def reviews(script, tmp_path, monkeypatch) -> Path:
    """A folder with 40 sentences of each label, of 5 to 14 words, two of which come twice."""
    for name, word in LABELS.items():
        lines = [
            f"{number} is a {word} film " + "so " * (number % 10) for number in (*range(40), 1, 2)
        ]
        content = "\n".join(lines).encode()
        (tmp_path / name).write_bytes(content)
        digest = hashlib.sha256(content).hexdigest()
        monkeypatch.setitem(script("make_film_reviews").SHA256, name, digest)
    return tmp_path


def made(script, reviews: Path, output: str, **settings: int) -> dict[str, list[dict]]:
    module = script("make_film_reviews")
    given = {"held_out": 5, "sft": 6, "beginning_words": 3} | settings
    module.main(
        module.FilmReviewsConfig(
            output_dir=str(reviews / output), folder=str(reviews), words=12, **given
        )
    )
    return records(reviews / output)


def test_no_sentence_is_in_two_sets_or_twice_in_one(script, reviews):
    sets = made(script, reviews, "data")
    assert {name: len(found) for name, found in sets.items()} == {
        **{"held_out": 5, "reward": 14, "gold": 14, "sft": 12, "prompts": 10}
    }
    sentences = [
        pair["prompt"] + pair[label]
        for name in ("held_out", "reward", "gold")
        for pair in sets[name]
        for label in ("chosen", "rejected")
    ]
    sentences += [one["prompt"] + one["response"] for one in sets["sft"]]
    assert len(set(sentences)) == len(sentences) == 2 * (5 + 14 + 14) + 12
    for name in ("held_out", "reward", "gold"):
        assert all(" is a fine film" in pair["chosen"] for pair in sets[name])
        assert all(" is a dull film" in pair["rejected"] for pair in sets[name])


def test_prompts_are_the_beginnings_of_sentences_that_are_held_out(script, reviews):
    sets = made(script, reviews, "data")
    sentences = [pair["prompt"] + pair[label] for pair in sets["held_out"] for label in pair]
    for prompt in (one["prompt"] for one in sets["prompts"]):
        assert len(prompt.removeprefix("Film review: ").split()) == 3
        assert any(sentence.startswith(prompt) for sentence in sentences)


def test_the_same_seed_makes_the_same_files_and_another_one_others(script, reviews):
    first, again, other = (
        made(script, reviews, output, seed=seed) for output, seed in (("a", 0), ("b", 0), ("c", 1))
    )
    assert first == again
    assert all(first[name] != other[name] for name in first)


def test_files_that_are_others_or_too_short_or_missing_are_refused(script, reviews):
    with pytest.raises(UserError, match=r"40 sentences of a label, \d+ of them of 6 to 12 words"):
        made(script, reviews, "data", held_out=36)
    (reviews / "rt-polarity.neg").write_text("a shorter file")
    with pytest.raises(UserError, match=r"rt-polarity\.neg is another file .* sha256 [0-9a-f]{64}"):
        made(script, reviews, "data")
    (reviews / "rt-polarity.pos").unlink()
    with pytest.raises(FileNotFoundError, match=r"rt-polarity\.pos"):
        made(script, reviews, "data")
    assert not (reviews / "data").exists()


def test_a_download_takes_the_first_address_that_answers_and_no_other_content(script):
    class Answers(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/there" else 404)
            self.end_headers()
            self.wfile.write(b"content")

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Answers)
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        gone, there = (
            f"http://127.0.0.1:{server.server_port}/{name}" for name in ("gone", "there")
        )
        digest, pinned = hashlib.sha256(b"content").hexdigest(), script("pinned_file").pinned_file
        assert pinned((gone, there), digest, None, "--copy") == b"content"
        with pytest.raises(UserError, match="the download is another file than expected"):
            pinned((there,), "0" * 64, None, "--copy")
        with pytest.raises(UserError, match=r"/gone .*404.*; .*/gone .*404.*copy takes a copy"):
            pinned((gone, gone), digest, None, "--copy")
    finally:
        server.shutdown()
        server.server_close()


@pytest.fixture
def gold(script, reviews, monkeypatch):
    """The module of the gold, after it has learned from the tiny files."""
    made(script, reviews, "data")
    module = script("polarity")
    output = reviews / "polarity.json"
    module.main(
        module.PolarityConfig(
            train_data=str(reviews / "data" / "gold.jsonl"),
            eval_data=str(reviews / "data" / "held_out.jsonl"),
            output=str(output),
            l2=0.01,
        )
    )
    monkeypatch.setenv("FASTP3O_POLARITY", str(output))
    return module


def test_the_gold_orders_reviews_by_their_words_and_says_how_often_it_is_right(gold, reviews):
    better, worse, unknown = gold.polarity(
        ["Film review: a"] * 3, [" fine film", " dull film", " glorious xyz"]
    )
    assert better > 0.5 > -0.5 > worse
    assert worse < unknown < better
    result = json.loads((reviews / "polarity.json").read_text())
    assert (result["accuracy"], result["pairs"]) == (1.0, 5)
    assert result["accuracy_low"] == result["accuracy_high"] == 1.0


def test_a_score_is_the_sum_of_the_weights_of_distinct_words_and_pairs_by_the_root_of_their_number(
    gold,
):
    weights = {"a": 1.0, "b": 10.0, "a b": 100.0, "b a": 1000.0, ".": -3.0, "it's": 7.0}
    scores = gold.log_odds(["A b a b .", "it's", ""], weights)
    # a, b, ., "a b", "b a", "b ."
    assert scores == pytest.approx([(1 + 10 - 3 + 100 + 1000) / math.sqrt(6), 7.0, 0.0])


def test_fitted_weights_are_where_the_gradient_of_the_regression_vanishes(gold, reviews):
    path, l2 = str(reviews / "data" / "gold.jsonl"), 0.01
    found = gold.read(path)
    weights = gold.weights_of(str(reviews / "polarity.json"))
    names = list(weights)
    x = np.zeros((len(found.texts), len(names)))
    for row, text in zip(x, found.texts, strict=True):
        has = [name in gold.features(text) for name in names]
        row[has] = sum(has) ** -0.5
    w, y = np.array([weights[name] for name in names]), np.array(found.positive, float)
    gradient = x.T @ (1 / (1 + np.exp(-x @ w)) - y) / len(y) + l2 * w
    assert np.abs(gradient).max() < 1e-5
    assert np.abs(w).max() > 0.1


@pytest.mark.parametrize("variable", [None, "no such file"])
def test_the_gold_without_its_weights_names_what_is_missing(gold, monkeypatch, variable):
    monkeypatch.delenv("FASTP3O_POLARITY")
    if variable:
        monkeypatch.setenv("FASTP3O_POLARITY", variable)
    with pytest.raises(UserError, match=r"FASTP3O_POLARITY must name a file .*polarity\.py"):
        gold.polarity(["Film review:"], [" fine"])
