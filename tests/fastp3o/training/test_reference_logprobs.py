from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from datasets import Dataset

from fastp3o.errors import UserError
from fastp3o.models.loading import load_policy
from fastp3o.models.reference import SecondModel
from fastp3o.packing.pack import Packing
from fastp3o.processes import NotFiniteError
from fastp3o.training import reference_logprobs
from fastp3o.training.reference_logprobs import ReferenceLogprobs, read_logprobs, write_logprobs
from tests.fastp3o.models.model_families import logprobs_alone

TOGETHER, APART = (("first_ids", "second_ids"),), (("first_ids",), ("second_ids",))


@pytest.fixture
def examples() -> Dataset:
    ids = torch.randint(0, 250, (7, 3, 9), generator=torch.Generator().manual_seed(0))
    columns = zip(("prompt_ids", "first_ids", "second_ids"), ids.unbind(1), strict=True)
    return Dataset.from_dict(
        {name: [row[: 1 + number].tolist() for number, row in enumerate(rows)] for name, rows in columns}
    )


@pytest.mark.parametrize("columns", [TOGETHER, APART], ids=["together", "apart"])
@pytest.mark.parametrize("chunk", [2, 1024])
def test_they_are_those_of_each_response_alone(tiny_model, examples, columns, chunk, monkeypatch, tmp_path):
    monkeypatch.setattr(reference_logprobs, "CHUNK", chunk)
    policy = load_policy(tiny_model)
    reference = SecondModel(policy, torch.device("cpu"), offload=False)
    kept = ReferenceLogprobs(Accelerator(cpu=True), tmp_path, {}, columns, Packing(20), [])
    stops: list[None] = []  # a run that is asked to stop ends after a chunk
    logprobs = kept.compute_one(reference, examples, lambda: stops.append(None))
    assert len(stops) == -(-len(examples) // chunk)
    with torch.no_grad(), policy.with_own_attention() as alone:
        expected = [
            [logprobs_alone(alone, e["prompt_ids"], e[name]).sum() for name in ("first_ids", "second_ids")]
            for e in examples
        ]
    torch.testing.assert_close(logprobs, torch.tensor(expected), atol=1e-4, rtol=1e-5)


def test_what_is_not_finite_is_not_kept(tiny_model, examples, tmp_path):
    policy = load_policy(tiny_model)
    with torch.no_grad():
        policy.model.model.norm.weight.fill_(torch.nan)
    kept = ReferenceLogprobs(Accelerator(cpu=True), tmp_path, {"data": examples}, TOGETHER, Packing(20), ["m"])
    with pytest.raises(NotFiniteError, match="a log-probability of the reference is NaN or infinite \\(14 values\\)"):
        kept.compute(SecondModel(policy, torch.device("cpu"), offload=False), list)
    assert not list(tmp_path.iterdir())


def test_a_name_is_of_all_that_they_depend_on(examples, tmp_path):
    def name(data: Dataset, *arguments) -> Path:
        return ReferenceLogprobs(Accelerator(cpu=True), tmp_path, {"data": data}, *arguments).paths["data"]

    cases = [
        (examples, TOGETHER, Packing(20), ["m", "fp32"]),
        (examples, APART, Packing(20), ["m", "fp32"]),
        (examples, TOGETHER, Packing(20), ["other", "fp32"]),
        (examples, TOGETHER, Packing(20), ["m", "fp16"]),
        (examples.select(range(6)), TOGETHER, Packing(20), ["m", "fp32"]),
    ]
    assert len({name(*case) for case in cases}) == len(cases)
    assert name(*cases[0]) == name(examples, TOGETHER, Packing(90), ["m", "fp32"])


def test_a_file_has_what_was_written_and_a_damaged_one_is_refused(tmp_path):
    path, logprobs = tmp_path / "new" / "file", torch.randn(5, 2)
    assert read_logprobs(path) is None
    write_logprobs(path, logprobs)
    assert torch.equal(read_logprobs(path), logprobs)
    for damaged in (path.read_bytes()[:-5], b"{}"):
        path.write_bytes(damaged)
        with pytest.raises(UserError, match=f"{path} is damaged"):
            read_logprobs(path)
