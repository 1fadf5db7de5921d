import json

import pytest

from fastp3o.evaluation.frontier import linear_fit, plot, print_table, read_run


def test_a_straight_frontier_is_fitted_exactly_and_told_with_standard_errors_unless_metrics_lack(tmp_path, capsys):
    lines = [
        {"step": 5 * i, "reward": 1 + 2 * kl, "reward_std": 0.5, "kl": kl, "kl_std": 0.1, "prompts": 16}
        for i, kl in enumerate([0.0, 0.5, 1.5])
    ]
    (tmp_path / "eval.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = read_run(tmp_path)
    assert linear_fit(run) == pytest.approx((2.0, 1.0))
    assert linear_fit(run[:1]) is None
    print_table({"joint": run})
    assert "4.000 ± 0.500 (0.125)" in capsys.readouterr().out
    plot({"joint": run}, tmp_path / "frontier.png")
    (tmp_path / "eval.jsonl").write_text('{"step": 0, "reward": 1, "kl": 0, "reward_std": 1}\n')
    with pytest.raises(ValueError, match=r"eval\.jsonl lacks kl_std, prompts at step 0"):
        read_run(tmp_path)
