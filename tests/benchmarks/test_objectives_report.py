from benchmarks import report
from benchmarks.objectives_report import objectives
from tests.benchmarks.results import result


def of(implementation, objective="DPO", operations=6.0, **more):
    counted = {"objective": objective, "counted_operations": operations, "dtype": "float32", "clock": "processor"}
    return result("objectives", implementation, **counted, **{"extra_gb": 0.0336, **more})


def test_a_cell_has_a_figure_for_each_way_and_a_dash_where_there_is_none():
    cpu = [of("fastp3o", ratio=1.25), of("TRL", operations=8.0, ratio=4.5), of("Liger", extra_gb=None)]
    cpu.append(of("fastp3o", objective="GRPO+", operations=5.0))
    header, dpo, plus = objectives(cpu, [of("fastp3o", ratio=1.1)])
    assert dpo == ["DPO", "6 / – / 8 / 6", "34 / – / 34 / –", "1.25 / – / 4.50 / 1.00", "1.10 / – / – / –"]
    assert plus == ["GRPO+", "5 / – / – / –", "34 / – / – / –", "1.00 / – / – / –", "not measured"]
    assert len(header) == len(dpo)


def test_both_devices_are_named():
    environment = {"device": "a CPU", "packages": {"torch": "2.13.0"}, "date": "2026-01-01"}
    cpu = {"environment": environment, "benchmarks": [of("fastp3o")]}
    assert "No GPU figure" in report.objectives_section(cpu, None)
    gpu = {"environment": environment | {"device": "a GPU"}, "benchmarks": [of("fastp3o")]}
    assert "float32 on the GPU: a GPU; torch 2.13.0" in report.objectives_section(cpu, gpu)


def test_what_is_committed_is_what_the_results_give():
    written = report.README.read_text()
    section = report.objectives_section(*report.objective_records())
    assert report.between_markers(written, "objectives", section) == written
