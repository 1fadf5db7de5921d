import sys

from fastp3o.commands import frontier as plot_frontier


def test_runs_of_the_same_name_are_all_shown(monkeypatch, tmp_path):
    shown = []
    monkeypatch.setattr(plot_frontier, "read_run", lambda folder: str(folder))
    monkeypatch.setattr(plot_frontier, "print_table", shown.append)
    monkeypatch.setattr(plot_frontier, "plot", lambda runs, output: None)
    monkeypatch.setattr(sys, "argv", ["plot_frontier.py", "a/p3o", "b/p3o", "b/ppo"])
    plot_frontier.main()
    assert shown == [{"a/p3o": "a/p3o", "b/p3o": "b/p3o", "ppo": "b/ppo"}]
