"""What a record says of its machine, and what pages say of a record that does not know."""

from benchmarks import environment
from benchmarks.environment import described, origin

CPUINFO = """processor\t: 0
vendor_id\t: AuthenticAMD
cpu family\t: 25
model\t\t: 17
model name\t: AMD EPYC

processor\t: 1
cpu family\t: 25
model\t\t: 17
model name\t: AMD EPYC
"""


def test_a_record_names_the_processors_family_and_the_commit(tmp_path, monkeypatch):
    path = tmp_path / "cpuinfo"
    path.write_text(CPUINFO)
    monkeypatch.setattr(environment, "CPUINFO", path)
    assert environment.processor() == "AMD EPYC, family 25, model 17"
    path.write_text("processor\t: 0\nCPU implementer\t: 0x41\n")
    assert environment.processor()
    found = environment.environment()
    assert {"device", "processor", "packages", "commit", "date"} <= found.keys()
    assert f"processor {found['processor']}" in described(found)
    assert str(tmp_path.parent) not in str(found)


def test_what_an_old_record_lacks_is_said():
    old = {"device": "CPU", "packages": {"torch": "2.13", "trl": None}, "date": "2026-11-21"}
    assert (
        described(old) == "CPU, processor not recorded; torch 2.13; commit not recorded, 2026-11-21"
    )
    assert origin(old | {"commit": "abc"}) == "commit abc, 2026-11-21"
    assert "not recorded" in described(None)
