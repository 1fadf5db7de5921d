"""Every bad input ends in its one line, and trains nothing."""

import os
import shlex
from pathlib import Path

import pytest

from tests.fastp3o.bad_inputs.cases import CASES, Case
from tests.fastp3o.bad_inputs.working import WORKING, run


@pytest.mark.parametrize("script", WORKING)
def test_without_the_mistake_it_works(script: str, place: Path, monkeypatch: pytest.MonkeyPatch):
    run(script, shlex.split(WORKING[script]), monkeypatch)


@pytest.mark.parametrize(
    "case", CASES, ids=lambda case: f"{case.script} {case.flags} {case.message}"[:80]
)
def test_a_bad_input_ends_in_one_line(case: Case, place: Path, monkeypatch, capfd):
    for name, content in case.files.items():
        (place / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    flags, working = shlex.split(case.flags), shlex.split(WORKING[case.script])
    with pytest.raises(SystemExit) as stopped:
        # A file of flags comes first.
        run(
            case.script,
            [*flags, *working] if flags == ["run.yaml"] else [*working, *flags],
            monkeypatch,
        )
    printed = capfd.readouterr()
    usage, said = stopped.value.code == 2, printed.err
    assert "secret" not in printed.out + printed.err + str(stopped.value.code)
    line = said.splitlines()[-1] if usage else str(stopped.value.code)
    assert case.message in line
    assert len(line.splitlines()) == 1
    assert usage or line.startswith("error: ")
    assert "Traceback" not in said
    assert not Path("o/model").exists(), "nothing is trained"
    assert "bad_rewards:" in case.flags or not Path("o").exists() or not os.listdir("o"), (
        "no run is begun"
    )
