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
