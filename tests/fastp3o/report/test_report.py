"""Runs to look at: the page of `fastp3o report`, what `fastp3o compare` shows, and what both say of
incomplete runs.
"""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from fastp3o.__main__ import main
from fastp3o.report.read import answers, differing_options, read_runs, short_names

NASTY = "</script><script>document.title = 'taken'</script> <b>&amp; $title @@title ${name} \u2028 \\ \"quoted\""
BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)


def made(folder: str, *, updates: int = 4, text: str = "An answer", **options) -> Path:
    """A run's folder with what its logs hold."""
    path = Path(folder)
    path.mkdir(parents=True)
    (path / "config.yaml").write_text(
        yaml.safe_dump({"model": "m", "output_dir": folder, "kl_coef": 0.1} | options)
    )
    metrics, evaluations, rollouts = [], [], []
    for step in range(1, updates + 1):
        parts = {"reward/a:good": 0.1 * step, "reward/b:short": -0.05 * step}
        metrics.append(
            {"step": step, "reward": 0.05 * step, "kl": 0.2 * step, "response_length": 9.0} | parts
        )
        for prompt in ("Why?", "How?"):
            responses = [
                {
                    "text": f"{text} {number} of update {step}",
                    "ids": list(range(3 + number)),
                    "reward": step + 0.25 * number,
                    "parts": {"reward/a:good": 0.1, "reward/b:short": None},
                    "log_ratio": None,
                    "finished": number > 0,
                }
                for number in range(2)
            ]
            rollouts.append({"step": step, "prompt": prompt, "kl": None, "responses": responses})
    evaluations = [
        {"step": step, "reward": 0.06 * step, "kl": 0.21 * step} for step in (0, updates)
    ]
    for name, records in (("metrics", metrics), ("eval", evaluations), ("rollouts", rollouts)):
        (path / f"{name}.jsonl").write_text(
            "".join(json.dumps(record) + "\n" for record in records)
        )
    return path


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["fastp3o", *arguments])
    main()


def data(page: str) -> dict:
    return json.loads(
        re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)[1]
    )


def test_a_page_holds_all_that_a_run_has_logged(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made("runs/a", text=NASTY)
    run(monkeypatch, "report", "runs/a")
    page = Path("runs/a/report.html").read_text()
    rows = data(page)["rows"]
    assert len(rows) == 16
    assert rows[0]["text"] == f"{NASTY} 0 of update 1"
    assert rows[0]["parts"] == {"a:good": 0.1, "b:short": None}
    assert {row["tokens"] for row in rows} == {3, 4}
    assert page.count("<script>") == 1, "what a policy wrote is no script of the page's"
    assert "reward: a:good" in page, "each part of the reward has a panel"
    assert not re.search(r"""(src|href)=["'](?!data:|#)""", page.split("<script")[0]), (
        "nothing is loaded"
    )


def test_a_page_says_what_it_leaves_out(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made("runs/a")
    run(monkeypatch, "report", "runs/a", "--most_responses", "6", "--output", "out/page.html")
    page = Path("out/page.html").read_text()
    assert "a: the last 6 of 16 logged" in page
    assert {row["update"] for row in data(page)["rows"]} == {3, 4}
    with pytest.raises(SystemExit):
        run(monkeypatch, "report", "runs/a", "--most_responses", "0")


def test_a_run_that_has_only_begun_has_a_page(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("runs/a").mkdir(parents=True)
    Path("runs/a/config.yaml").write_text("model: m\n")
    Path("runs/a/metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "lo')
    run(monkeypatch, "report", "runs/a")
    page = Path("runs/a/report.html").read_text()
    assert "Steps: a 1" in page
    assert "No run has been evaluated." in page
    assert data(page) == {"runs": ["a"], "rows": []}


def test_folders_that_are_no_runs_are_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made("runs/a")
    Path("empty").mkdir()
    for folders, message in (
        (["empty"], "empty holds no run: it has no config.yaml"),
        (["runs/a", "runs/../runs/a"], "runs/a is named twice"),
    ):
        with pytest.raises(SystemExit, match=message):
            run(monkeypatch, "report", *folders)


@pytest.mark.parametrize(
    ("folders", "names"),
    [
        (["/r/a", "/r/b"], ["a", "b"]),
        (["/r/a/x", "/r/b/x"], ["a/x", "b/x"]),
        (["/a", "/b/a"], ["//a", "b/a"]),
        (["/r/only"], ["only"]),
    ],
)
def test_runs_have_the_shortest_names_that_differ(folders, names):
    assert short_names([Path(folder) for folder in folders]) == names


def test_runs_side_by_side(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    made("runs/a", text="First")
    made("runs/b", text="Second", updates=6, kl_coef=0.2, objective="grpo")
    made("runs/c")
    runs = read_runs([Path("runs/a"), Path("runs/b")])
    assert differing_options(runs) == {"kl_coef": [0.1, 0.2], "objective": [None, "grpo"]}
    texts = [[answer.text for answer in of_runs] for of_runs in answers(runs).values()]
    assert texts == [["First 0 of update 4", "Second 0 of update 6"]] * 2
    assert differing_options(read_runs([Path("runs/a"), Path("runs/c")])) == {}
    run(monkeypatch, "compare", "runs/a", "runs/b")
    shown = capsys.readouterr().out
    for part in ("kl_coef", "grpo", "Second 0 of update 6", "curves: compare.png"):
        assert part in shown
    assert Path("compare.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "arguments", [[], ["runs/a"], ["runs/a", "--first", "runs/a"], ["--first", "runs/a"]]
)
def test_comparisons_need_two_runs_or_two_sets(tmp_path, monkeypatch, arguments):
    monkeypatch.chdir(tmp_path)
    made("runs/a")
    with pytest.raises(SystemExit):
        run(monkeypatch, "compare", *arguments)


@pytest.mark.skipif(BROWSER is None, reason="needs Chromium")
def test_a_browser_shows_sorts_and_searches_the_page(tmp_path, monkeypatch):
    """The page as a browser leaves it, with a search typed by a script that is added for the test."""
    monkeypatch.chdir(tmp_path)
    made("runs/a", text=NASTY)
    made("runs/b", text="Plain", kl_coef=0.2)
    run(monkeypatch, "report", "runs/a", "runs/b", "--output", "page.html")

    def shown(typed: str) -> list[str]:
        page = Path("page.html").read_text()
        Path("typed.html").write_text(page.replace("</body>", f"<script>{typed}</script></body>"))
        options = [
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-background-networking",
            "--dump-dom",
        ]
        browser = [
            BROWSER,
            *options,
            f"--user-data-dir={tmp_path / 'browser'}",
            Path("typed.html").resolve().as_uri(),
        ]
        left = subprocess.run(
            browser, capture_output=True, text=True, timeout=120, check=True
        ).stdout
        assert "<title>a, b</title>" in left
        body = left[left.index('id="responses"') :]
        return re.findall(r"<tr><td>(.*?)</tr>", body, re.S)

    best = shown("")
    assert len(best) == 32
    assert "of update 4" in best[0]
    assert "of update 1" in best[-1]
    assert "&lt;/script&gt;" in "".join(best)
    searched = shown(
        "control('search').value = 'PLAIN 1'; control('order').value = 'worst'; draw();"
    )
    assert len(searched) == 8
    assert "Plain 1 of update 1" in searched[0]
    assert len(shown("control('run').value = 'b'; control('update').value = '3'; draw();")) == 4
