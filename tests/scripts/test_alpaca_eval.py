"""Comparisons of a clone of AlpacaEval: the judge's choices with their probabilities, and no
instruction in two sets.
"""

import json
import shutil
import subprocess

import pytest

from tests.scripts.test_made_data import SCRIPTS, records, run

HARD, SOFT = "alpaca_eval_gpt4", "weighted_alpaca_eval_gpt4_turbo"
BASELINES = {HARD: "text_davinci_003", SOFT: "gpt4_1106_preview"}
# What is of no use: without a verdict, the same answers, an empty one, one too long, a long instruction.
USELESS = (
    {"preference": None},
    {"output_1": "same", "output_2": " same\n"},
    {"output_2": " "},
    {"output_1": "x" * 101},
    {"instruction": "Say " + "x" * 100},
)


def annotation(judge: str, model: str, number: int, preference: float | None) -> dict:
    return {
        "instruction": f"Name tree {number}.",
        "output_1": f"the baseline's {number}",
        "output_2": f"{model}'s {number}",
        "generator_1": BASELINES[judge],
        "generator_2": model,
        "annotator": judge,
        "preference": preference,
    }


def commit(folder) -> None:
    named = ("-c", "user.name=a", "-c", "user.email=a@b")
    for arguments in (("init", "-q"), ("add", "."), (*named, "commit", "-qm", "results")):
        subprocess.run(["git", "-C", folder, *arguments], check=True, capture_output=True)


def write(folder, model: str, judge: str, annotations: list[dict]):
    path = folder / "results" / model / judge / "annotations.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(annotations))
    return path


@pytest.fixture
def clone(tmp_path, monkeypatch):
    """Two models by each judge on ten instructions, one in three of which the baseline wins."""
    if shutil.which("git") is None:
        pytest.skip("a clone is read by git")
    monkeypatch.syspath_prepend(SCRIPTS)
    folder = tmp_path / "clone"
    for judge, certain in ((HARD, 1.0), (SOFT, 0.8)):
        for model in ("A", "B", "NullModel"):
            preferences = [2 - certain if number % 3 == 0 else 1 + certain for number in range(10)]
            found = [annotation(judge, model, *one) for one in enumerate(preferences)]
            useless = [annotation(judge, model, 3, 2.0) | one for one in USELESS]
            write(folder, model, judge, found + useless)
    write(folder, "A", "another_judge", [annotation(HARD, "A", 4, 1.0) | {"annotator": "other"}])
    return folder


def make(monkeypatch, clone, *flags: str) -> dict[str, list[dict]]:
    sizes = ("--comparisons", "12", "--held_out", "8", "--answer_characters", "100")
    shorter = ("--prompt_characters", "100")
    output = clone.parent / "data"
    given = ("--clone", str(clone), "--output_dir", str(output), *sizes, *shorter, *flags)
    run(monkeypatch, "make_alpaca_eval", *given)
    return records(output)


def test_the_answer_that_the_judge_prefers_is_chosen_with_its_probability(clone, monkeypatch):
    commit(clone)
    found = make(monkeypatch, clone)
    everything = found["train"] + found["held_out"]
    assert {one["judge"] for one in everything} == {HARD, SOFT}
    for one in everything:
        number = int(one["prompt"].removesuffix(".\n\nAssistant:").split("tree ")[1])
        baseline = BASELINES[one["judge"]]
        names = one["chosen_model"], one["rejected_model"]
        assert (names[0] == baseline) == (number % 3 == 0)
        assert baseline in names
        assert set(names) & {"A", "B"}
        texts = [
            f" the baseline's {number}" if name == baseline else f" {name}'s {number}"
            for name in names
        ]
        assert [one["chosen"], one["rejected"]] == texts
        assert one["probability"] == pytest.approx(1.0 if one["judge"] == HARD else 0.8)


def test_sets_have_their_sizes_share_no_instruction_and_follow_the_seed(clone, monkeypatch):
    commit(clone)
    found = make(monkeypatch, clone)
    for name, number in (("train", 12), ("held_out", 8)):
        judges = [one["judge"] for one in found[name]]
        assert judges.count(HARD) == judges.count(SOFT) == number / 2
        lines = [json.dumps(one) for one in found[name]]
        assert len(set(lines)) == number
    prompts = [{one["prompt"] for one in found[name]} for name in ("train", "held_out")]
    # Ten instructions of two models: none comes twice before each of its set has come once.
    assert list(map(len, prompts)) == [6, 4]
    assert not prompts[0] & prompts[1]
    assert make(monkeypatch, clone) == found
    assert make(monkeypatch, clone, "--seed", "1") != found


def test_hard_labels_are_of_the_same_comparisons_and_a_tie_stays_one(clone, monkeypatch):
    ties = [annotation(SOFT, "C", number, 1.5 - 1.5 * (number % 2)) for number in range(10)]
    write(clone, "C", SOFT, ties)
    commit(clone)
    found = make(monkeypatch, clone, "--comparisons", "24", "--seed", "1")
    soft, hard = found["train"], found["train_hard"]
    assert [one | {"probability": 0} for one in soft] == [one | {"probability": 0} for one in hard]
    rounded = [0.5 if one["probability"] == 0.5 else 1.0 for one in soft]
    assert [one["probability"] for one in hard] == rounded
    assert 0.5 in rounded


def test_files_that_a_clone_lacks_are_counted(clone, monkeypatch, capsys):
    commit(clone)
    lacking = "HEAD:results/B/alpaca_eval_gpt4/annotations.json"
    asked = ["git", "-C", clone, "rev-parse", lacking]
    name = subprocess.run(asked, check=True, capture_output=True, text=True).stdout.strip()
    (clone / ".git" / "objects" / name[:2] / name[2:]).unlink()
    found = make(monkeypatch, clone)
    assert "3 files of annotations, 1 that the clone lacks" in capsys.readouterr().out
    hard = [one for one in found["train"] + found["held_out"] if one["judge"] == HARD]
    assert {"B"}.isdisjoint(
        name for one in hard for name in (one["chosen_model"], one["rejected_model"])
    )


def test_what_is_wrong_with_a_clone_is_said(clone, monkeypatch):
    def refused(*flags: str) -> str:
        with pytest.raises(SystemExit) as refusal:
            make(monkeypatch, clone, *flags)
        return str(refusal.value)

    assert "is not a clone of AlpacaEval" in refused()
    wrong = write(clone, "C", SOFT, [annotation(SOFT, "C", 0, 3.0)])
    commit(clone)
    assert f"{wrong.relative_to(clone)}, entry 0: preference is 3.0" in refused()
    shutil.rmtree(wrong.parent)
    commit(clone)
    assert f"comparisons of {HARD} are too few for 50 in train.jsonl" in refused(
        "--comparisons", "100"
    )
    shutil.rmtree(clone / "results")
    (clone / "results").mkdir()
    (clone / "results" / "note.txt").write_text("nothing")
    commit(clone)
    assert "has no annotations.json" in refused()
