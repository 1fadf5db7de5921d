"""Each family in each precision, with activations as large as trained models have: it holds, or is
told and served.
"""

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor

from fastp3o.models.frozen import load_held
from fastp3o.models.loading import load_policy
from fastp3o.models.overflow import OverflowsError
from fastp3o.models.packable import TOLERANCE, trial_overflow
from fastp3o.models.packed_model import PackedModel, labeled_logprobs
from fastp3o.packing.pack import Packing, pack
from fastp3o.rollouts.engine_sampler import decodable_shapes
from fastp3o.runtime.context import Context
from fastp3o.runtime.precision import Precision, named_precision
from tests.fastp3o.models.model_families import BEGIN, FAMILIES, random_model, with_large_stream

REACH = 103_795.0  # of Gemma 3 270M
(ROW,) = pack([[BEGIN, 5, 6, 7], [BEGIN, 12]], [[[8, 9, 2], [10]], [[3, 2], [11, 4]]], Packing(100))


def context_in(precision: Precision) -> Context:
    return Context(Accelerator(cpu=True), precision, None, None)


def saved(folder: Path, family: str, reach: float = 0.0) -> str:
    model = random_model(family)
    (with_large_stream(model, reach) if reach else model).save_pretrained(folder)
    return str(folder)


@torch.no_grad()
def logprobs(model: PackedModel, autocast: torch.dtype | None = None) -> Tensor:
    with nullcontext() if autocast is None else torch.autocast("cpu", autocast):
        return labeled_logprobs(model.eval(), ROW)


def holds_its_stream(model: PackedModel) -> bool:
    """Whether large values are in a residual stream in fp32 alone: norms behind the blocks make
    them there.
    """
    return all(
        hasattr(layer, "fastp3o_wiring") and len(layer.fastp3o_wiring.norms) == 4
        for layer in model.layers()
    )


@pytest.mark.parametrize("reach", [0.0, REACH], ids=["plain", "large"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_holds_in_a_precision_or_is_told_and_served(
    family: str, reach: float, tmp_path: Path, capsys
):
    name = saved(tmp_path, family, reach)
    policy = load_policy(name)
    expected, overflows = logprobs(policy), bool(reach) and not holds_its_stream(policy)
    assert overflows == bool(reach and "gemma" not in family)
    assert expected.isfinite().all()
    for precision in map(named_precision, ("fp32", "bf16-autocast", "bf16", "fp16")):
        if precision.name == "fp16" and overflows:
            with pytest.raises(
                ValueError, match=rf"{name} overflows fp16: .* maximum is 65,504: --precision auto"
            ):
                load_held(context_in(precision), load_policy, name, dtype=precision.weights)
            precision = precision._replace(automatic=True)
        model = load_held(context_in(precision), load_policy, name, dtype=precision.weights)
        served = precision.name == "fp16" and overflows
        assert (model.model.dtype == precision.weights) != bool(served)
        assert f"--precision auto: {name} in " in capsys.readouterr().out or not served
        got = logprobs(model, precision.autocast)
        assert got.isfinite().all()
        assert (got - expected).abs().mean() < TOLERANCE[torch.bfloat16]


def test_a_weight_beyond_fp16_is_told_by_its_value_and_one_that_is_broken_is_no_overflow(
    tmp_path: Path, capsys
):
    model = random_model("llama")
    with torch.no_grad():
        # which the tokens of a trial do not read
        model.model.embed_tokens.weight[21, 7] = -70_000.0
    model.save_pretrained(tmp_path / "large")
    says = r".* overflows fp16: the weight model.embed_tokens.weight reaches 70,000, and fp16's maximum is 65,504: "
    fp16 = named_precision("fp16")
    with pytest.raises(OverflowsError, match=says + "use another --precision"):
        load_policy(str(tmp_path / "large"), dtype=torch.float16)
    with pytest.raises(ValueError, match=says + "--precision auto"):
        load_held(context_in(fp16), load_policy, str(tmp_path / "large"), dtype=torch.float16)
    automatic = context_in(fp16._replace(automatic=True))
    assert (
        load_held(automatic, load_policy, str(tmp_path / "large"), dtype=torch.float16).model.dtype
        != torch.float16
    )
    assert (
        "in a trial the weight model.embed_tokens.weight reaches 70,000" in capsys.readouterr().out
    )
    assert "the weight model.embed_tokens.weight" in str(
        trial_overflow(load_policy(str(tmp_path / "large")))
    )
    with torch.no_grad():
        model.model.embed_tokens.weight[21, 7] = torch.inf
    model.save_pretrained(tmp_path / "broken")
    with pytest.raises(
        ValueError, match=r"weights that are NaN or infinite in torch.float16: model.embed"
    ):
        load_held(automatic, load_policy, str(tmp_path / "broken"), dtype=torch.float16)


def test_what_a_model_computes_in_fp32_does_not_overflow():
    """As in a residual stream that is kept in fp32: only what is in half precision counts."""
    model = PackedModel(random_model("llama"))
    last = model.layers()[1]
    handle = last.register_forward_hook(lambda _, __, values: values.float() * 1e6)
    assert trial_overflow(model) is None
    handle.remove()
    last.register_forward_hook(lambda _, __, values: values * 1e6)
    assert trial_overflow(model) is None
    last.mlp.down_proj.register_forward_hook(lambda _, __, values: values * 1e6)
    assert trial_overflow(model).place == "model.layers.1.mlp.down_proj"


def test_the_engine_tells_where_a_policy_is_not_finite_and_names_no_other_cause():
    policy = PackedModel(with_large_stream(random_model("llama"), REACH).half())
    with pytest.raises(
        ValueError,
        match=r"^LlamaForCausalLM overflows fp16: .* maximum is 65,504: use another --pre",
    ):
        decodable_shapes(policy)
    decodable_shapes(PackedModel(with_large_stream(random_model("gemma3"), REACH).half()))
    with torch.no_grad():
        policy = PackedModel(random_model("llama"))
        policy.model.model.layers[1].mlp.up_proj.weight.fill_(torch.nan)
    says = r"not finite in torch.float32: model.layers.1.mlp.up_proj is the first that is NaN or infinite$"
    with pytest.raises(ValueError, match=says):
        decodable_shapes(policy)
