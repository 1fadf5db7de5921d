"""Generation without training: the files, when they exist, and how many processes write them."""

import json
import signal
import sys
from pathlib import Path

import pytest

from fastp3o.data.loading import load_demonstrations, load_preferences
from fastp3o.errors import UserError
from fastp3o.generate import loop
from fastp3o.generate.config import GenerateConfig
from fastp3o.generate.loop import generate
from fastp3o.run.folder import release
from fastp3o.run.manifest import CorruptStateError, ResumeError
from fastp3o.runtime.finiteness import NotFiniteError
from tests.fastp3o.evaluation.test_judge import JUDGES
from tests.fastp3o.together import together

RUNS = Path(__file__).parents[1] / "training" / "runs_of_a_process.py"
# Of eight prompts.
SETTINGS = {
    "prompts": "prompts.jsonl",
    "reward": "rewards_for_tests:varied",
    "keep_unfinished": True,
}
SETTINGS |= {
    "responses_per_prompt": 4,
    "rollout_batch_size": 3,
    "max_prompt_tokens": 32,
    "max_response_tokens": 6,
}


def config(tiny_model: str, folder: str, **changes) -> GenerateConfig:
    return GenerateConfig(**(SETTINGS | {"model": tiny_model, "output_dir": folder} | changes))


def flags(tiny_model: str, folder: str, reward: str) -> list[str]:
    settings = SETTINGS | {"model": tiny_model, "output_dir": folder, "reward": reward}
    return [
        "generate",
        *(part for name, value in settings.items() for part in (f"--{name}", str(value))),
    ]


def records(folder: str, name: str = "kept.jsonl") -> list[dict]:
    return [
        json.loads(line) for line in Path(folder, name).read_text(encoding="utf-8").splitlines()
    ]


def contents(folder: str) -> list[bytes]:
    return [Path(folder, name).read_bytes() for name in ("samples.jsonl", "kept.jsonl")]


def test_what_is_kept_loads_as_training_data(workplace, tiny_model, tokenizer):
    limits = {"max_prompt_tokens": 32, "max_response_tokens": 32}
    done = generate(config(tiny_model, "best"))
    assert (done.prompts, done.responses, done.records, done.prompts_kept) == (8, 32, 8, 8)
    assert [line["prompt"] for line in records("best")] == [
        line["prompt"] for line in records(".", "prompts.jsonl")
    ]
    samples = records("best", "samples.jsonl")
    assert [line["reward"] for line in records("best")] == [
        max(line["rewards"]) for line in samples
    ]
    assert done.mean_reward == pytest.approx(sum(sum(line["rewards"]) for line in samples) / 32)
    examples, _ = load_demonstrations("best/kept.jsonl", tokenizer, **limits)
    completions = [tokenizer.decode(ids[:-1]) for ids in examples["response_ids"]]
    assert completions == [line["completion"] for line in records("best")]
    pairs = generate(config(tiny_model, "pairs", keep="rs_dpo", min_gap=0.5))
    examples, _ = load_preferences("pairs/kept.jsonl", tokenizer, **limits)
    assert len(examples) == pairs.records > 8
    assert min(line["margin"] for line in records("pairs")) > 0.5
    Path("judges_by_length.py").write_text(JUDGES)
    judged = generate(
        config(tiny_model, "judged", judge="judges_by_length:longer", keep="judged", reward=None)
    )
    assert judged.records + judged.ties == 16
    assert all(len(line["chosen"]) > len(line["rejected"]) for line in records("judged"))
    examples, _ = load_preferences("judged/kept.jsonl", tokenizer, **limits)
    assert len(examples) == judged.records == len(records("judged")) > 4


def test_comparisons_choose_the_best_of_n_and_the_winner_of_a_tournament(workplace, tiny_model):
    Path("comparing.py").write_text(
        "ASKED = []\n"
        "def later(prompts, firsts, seconds):\n"
        "    ASKED.extend(firsts)\n"
        "    return [float(a > b) for a, b in zip(firsts, seconds)]\n"
    )
    kept = {}
    for keep, comparisons in (("best", 6), ("tournament", 3)):
        generate(config(tiny_model, keep, reward="comparing:later", keep=keep))
        asked = sys.modules["comparing"].ASKED
        assert len(asked) == 1 + 8 * comparisons  # with the trial before the run
        asked.clear()
        kept[keep] = [line["completion"] for line in records(keep)]
        assert kept[keep] == [max(line["responses"]) for line in records(keep, "samples.jsonl")]
    assert kept["best"] == kept["tournament"]
    with pytest.raises(UserError, match="--keep tournament needs a reward that compares responses"):
        generate(config(tiny_model, "scores", keep="tournament"))


def test_the_pairs_that_are_compared_can_be_chosen_and_decide_the_rewards(workplace, tiny_model):
    Path("in_pairs.py").write_text(
        "ASKED = []\n"
        "def later(prompts, firsts, seconds):\n"
        "    ASKED.extend(zip(prompts, firsts, seconds))\n"
        "    return [float(a > b) for a, b in zip(firsts, seconds)]\n"
    )

    def lead(first: str, second: str) -> float:
        return (first > second) - (first < second)

    def lines(comparisons: str) -> tuple[list[dict], list[tuple[str, str, str]]]:
        generate(config(tiny_model, comparisons, reward="in_pairs:later", comparisons=comparisons))
        asked = sys.modules["in_pairs"].ASKED
        made = asked[1:]  # after the trial before the run
        asked.clear()
        return records(comparisons, "samples.jsonl"), made

    (every, _), (circular, in_circles), (anchored, with_anchors) = map(
        lines, ("all", "circular", "anchor")
    )
    texts = [line["responses"] for line in every]
    assert (
        [line["responses"] for line in circular]
        == [line["responses"] for line in anchored]
        == texts
    )
    assert all(len({*its}) == 4 for its in texts)
    assert len(in_circles) == len(with_anchors) == 8 * 4
    anchors = {prompt: second for prompt, _, second in with_anchors}
    assert len({*with_anchors}) == 8 * 4
    assert {(prompt, anchors[prompt]) for prompt, *_ in with_anchors} == {
        (p, second) for p, _, second in with_anchors
    }
    for line, its in zip(circular, texts, strict=True):
        beside = [(its[place - 1], its[(place + 1) % 4]) for place in range(4)]
        expected = [
            (lead(a, before) + lead(a, after)) / 8
            for a, (before, after) in zip(its, beside, strict=True)
        ]
        assert line["rewards"] == expected
    for line, its in zip(anchored, texts, strict=True):
        leads = [lead(text, anchors[line["prompt"]]) / 2 for text in its]
        assert anchors[line["prompt"]] not in its
        assert line["rewards"] == [sum(mine - other for other in leads) / 8 for mine in leads]
    assert [line["completion"] for line in records("anchor")] == [
        its[line["rewards"].index(max(line["rewards"]))]
        for line, its in zip(anchored, texts, strict=True)
    ]


def test_anchors_of_a_resumed_run_are_those_of_an_unbroken_one(workplace, tiny_model):
    Path("with_anchors.py").write_text(
        "def later(prompts, firsts, seconds):\n    return [float(a > b) for a, b in zip(firsts, seconds)]\n"
    )
    settings = {"reward": "with_anchors:later", "comparisons": "anchor"}
    generate(config(tiny_model, "run", **settings))
    whole = contents("run")
    Path("run/samples.jsonl").write_bytes(whole[0][: whole[0].index(b'{"number": 4')])
    generate(config(tiny_model, "run", resume=True, **settings))
    assert contents("run") == whole


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"keep": "tournament"},
            "--keep tournament chooses the pairs that are compared: leave out --comparisons",
        ),
        ({"keep": "judged", "judge": "a:b"}, "--keep judged chooses the pairs that are compared"),
        (
            {"keep": "revised", "reward": None, "principles": "p"},
            "--keep revised chooses the pairs",
        ),
        ({"keep": "none", "reward": None}, "--comparisons anchor has no effect without --reward"),
        ({"responses_per_prompt": 1}, "--responses_per_prompt must be at least 2, got 1"),
    ],
)
def test_a_choice_of_pairs_without_effect_is_refused(tiny_model, changes, message):
    with pytest.raises(UserError, match=message):
        config(tiny_model, "run", comparisons="anchor", **changes)


def test_one_response_alone_is_refused_by_a_reward_that_compares(workplace, tiny_model):
    Path("of_pairs.py").write_text(
        "def better(prompts, firsts, seconds):\n    return [0.5] * len(prompts)\n"
    )
    with pytest.raises(
        UserError, match=r"of_pairs:better compares responses .* must be at least 2"
    ):
        generate(config(tiny_model, "run", reward="of_pairs:better", responses_per_prompt=1))
    assert not Path("run").exists()


def test_a_choice_of_pairs_is_refused_for_a_reward_that_scores(workplace, tiny_model):
    with pytest.raises(
        UserError, match="--comparisons circular has no effect without a reward that judges pair by"
    ):
        generate(config(tiny_model, "run", comparisons="circular"))
    assert not Path("run").exists()


def test_a_run_that_is_cut_anywhere_samples_only_what_is_missing(
    workplace, tiny_model, monkeypatch, capsys
):
    """It ends with the bits of an unbroken one."""
    generate(config(tiny_model, "run"))
    samples, kept = contents("run")
    fourth = samples.index(b'{"number": 3')
    for cut in (0, fourth - 1, samples.index(b'"number": 7') + 9, len(samples) - 1):
        Path("run/samples.jsonl").write_bytes(samples[:cut])
        Path("run/kept.jsonl").unlink(missing_ok=True)
        generate(config(tiny_model, "run", resume=True))
        assert contents("run") == [samples, kept], cut
    marked = samples.replace(b'"rewards": [', b'"rewards": [ ', 3)
    Path("run/samples.jsonl").write_bytes(marked[: fourth + 3] + b"no line\n")
    generate(config(tiny_model, "run", resume=True))
    assert (
        "--resume: 3 of 8 prompts have their responses in run/samples.jsonl"
        in capsys.readouterr().out
    )
    assert contents("run") == [marked, kept]
    # Samples of something else, or of nothing known, are not gone on with.
    for changes in ({"seed": 1}, {"temperature": 0.5}, {"limit": 3}, {"rollout_batch_size": 4}):
        with pytest.raises(
            ResumeError, match=f"this would be a different run: --{next(iter(changes))}"
        ):
            generate(config(tiny_model, "run", resume=True, **changes))
    manifest = Path("run/manifest.json").rename("elsewhere")
    with pytest.raises(
        CorruptStateError, match=r"the samples in run are of cannot be told: manifest\.json "
    ):
        generate(config(tiny_model, "run", resume=True))
    manifest.rename("run/manifest.json")
    assert contents("run") == [marked, kept]
    # Nothing is sampled again, and no model loaded, where only what is kept is another.
    monkeypatch.setattr(loop, "load_models", None)
    assert generate(config(tiny_model, "run", keep="rs_dpo", resume=True)).records > 8


def test_a_reward_that_is_not_finite_or_keeps_nothing_is_an_error_and_batches_before_it_stay(
    workplace, tiny_model
):
    with pytest.raises(NotFiniteError, match="a reward is NaN or infinite"):
        generate(config(tiny_model, "run", reward="rewards_for_tests:nan_on_third_call"))
    assert [line["number"] for line in records("run", "samples.jsonl")] == list(range(6))
    assert not Path("run/kept.jsonl").exists()
    release(Path("run"))
    nothing = r"nothing of 32 responses is kept by --keep rest: rewards go from .*--resume"
    with pytest.raises(ValueError, match=nothing):
        generate(config(tiny_model, "other", keep="rest", threshold=1e6))
    assert not list(Path("other").glob("kept*"))


KILLS = """
import os, pathlib, signal
from rewards_for_tests import varied

def kills(prompts, responses):
    if prompts[0] == "Say eagle:" and not pathlib.Path("killed").exists():
        pathlib.Path("killed").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return varied(prompts, responses)
"""


def test_two_processes_of_which_one_is_killed_write_what_one_does(workplace, tiny_model):
    """Eight prompts are three batches: two processes share them unevenly."""
    Path("killing.py").write_text(KILLS)
    begun, fresh = (
        flags(tiny_model, *run)
        for run in (("begun", "killing:kills"), ("fresh", SETTINGS["reward"]))
    )
    killed = together(RUNS, *begun, processes=1)
    assert killed.returncode == -signal.SIGKILL
    assert len(records("begun", "samples.jsonl")) == 6
    done = together(RUNS, *begun, "--resume", "+", *fresh)
    assert done.returncode == 0, done.stdout
    assert "resuming on another number of processes: 1 before, 2 now" in done.stdout
    generate(config(tiny_model, "alone"))
    assert contents("begun") == contents("fresh") == contents("alone")
