import json

import matplotlib.image
import pytest

from fastp3o.evaluation.frontier import linear_fit, plot, print_table, read_run


def write_run(folder, rewards, kls):
    folder.mkdir()
    lines = [
        {"step": 5 * i, "reward": r, "reward_std": 0.5, "kl": k, "kl_std": 0.1, "prompts": 16}
        for i, (r, k) in enumerate(zip(rewards, kls, strict=True))
    ]
    (folder / "eval.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return read_run(folder)


def test_a_straight_frontier_is_fitted_exactly(tmp_path):
    run = write_run(tmp_path / "run", [1.0, 2.0, 4.0], [0.0, 0.5, 1.5])
    assert linear_fit(run) == pytest.approx((2.0, 1.0))


def test_one_point_has_no_line(tmp_path):
    assert linear_fit(write_run(tmp_path / "run", [1.0], [0.0])) is None


def test_many_runs_in_one_picture_and_table(tmp_path, capsys):
    runs = {name: write_run(tmp_path / name, [0.0, 1.0], [0.0, k]) for name, k in (("joint", 1.0), ("none", 2.0))}
    print_table(runs)
    table = capsys.readouterr().out
    assert "joint" in table
    assert "1.000 ± 0.500 (0.125)" in table
    plot(runs, tmp_path / "frontier.png")
    assert matplotlib.image.imread(tmp_path / "frontier.png").std() > 0


def test_an_evaluation_without_its_metrics_says_which(tmp_path):
    write_run(tmp_path / "run", [0.0], [0.0])
    path = tmp_path / "run" / "eval.jsonl"
    path.write_text('{"step": 0, "reward": 1, "kl": 0, "reward_std": 1}\n')
    with pytest.raises(ValueError, match=r"eval\.jsonl lacks kl_std, prompts at step 0"):
        read_run(tmp_path / "run")
    path.write_text("")
    with pytest.raises(ValueError, match=r"eval\.jsonl has no evaluations"):
        read_run(tmp_path / "run")


def test_a_run_with_one_evaluation_is_a_table_line_and_a_point(tmp_path, capsys):
    runs = {"short": write_run(tmp_path / "short", [1.0], [0.0])}
    print_table(runs)
    assert capsys.readouterr().out.count("short") == 1
    plot(runs, tmp_path / "new" / "frontier.png")
    assert (tmp_path / "new" / "frontier.png").stat().st_size > 0


def test_the_table_shows_the_first_and_the_last_evaluation(tmp_path, capsys):
    print_table({"run": write_run(tmp_path / "run", [0.0, 7.0, 1.0], [0.0, 1.0, 2.0])})
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if "│ run" in line]
    assert [(line[3], line[5]) for line in lines] == [("0", "16"), ("10", "16")]


def test_the_legend_names_each_run_once(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda figure, *_, **__: drawn.append(figure))
    runs = {"line": write_run(tmp_path / "line", [0.0, 1.0], [0.0, 2.0])}
    plot(runs | {"point": write_run(tmp_path / "point", [1.0], [0.0])}, tmp_path / "frontier.png")
    legend = drawn[0].axes[0].get_legend()
    assert [text.get_text() for text in legend.get_texts()] == ["line: 0.500 · KL + 0.00", "point"]
