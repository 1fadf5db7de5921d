"""What a trial recognizes in a model's layers, and what comes of it: on a CPU the same bits in
fp32, a stream in fp32 for half precision, and with kernels, in Triton's interpreter, the same
numbers within rounding.
"""

import copy
from collections import Counter
from functools import wraps
from types import MethodType

import pytest
import torch
import transformers as hf
from torch import nn

from fastp3o.models import fused_layers, packed_model
from fastp3o.models.fused_layers import gate_of, norm_of, wiring_of, with_fused_rotation
from fastp3o.models.packed_model import PackedModel, labeled_logprobs
from fastp3o_kernels.layers import gate, norm, rotary
from tests.fastp3o.models import model_families as families
from tests.kernels.interpreted import counted_launches

WIRED = ("llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3", "granite")
HALVES = [torch.float16, torch.bfloat16]


def unfused(monkeypatch, model):
    with monkeypatch.context() as patch:
        patch.setattr(packed_model, "fuse", lambda *_: None)
        return PackedModel(model)


def with_kernels(monkeypatch):
    """As on a GPU: the interpreter takes tensors on the CPU."""
    for module in (fused_layers, norm, gate, rotary):
        monkeypatch.setattr(module, "use_triton", lambda impl, *_: impl is None)


def results(model, groups=families.FOURS):
    """Log-probs of a row and the gradients of their sum of squares."""
    model.zero_grad()
    logprobs = labeled_logprobs(model, groups.row())
    logprobs.square().sum().backward()
    return [logprobs.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def error(found, exact):
    """Of all gradients, next to their size."""
    pairs = [*zip(found, exact, strict=True)][1:]
    size = sum(b.double().square().sum().item() for _, b in pairs)
    return (sum((a.double() - b.double()).square().sum().item() for a, b in pairs) / size) ** 0.5


@pytest.mark.parametrize("family", families.FAMILIES)
def test_what_is_recognized(family):
    before = torch.get_rng_state()
    model = PackedModel(families.random_model(family, tie_word_embeddings=False))
    torch.manual_seed(0)
    assert [hasattr(layer, "fastp3o_wiring") for layer in model.layers()] == 2 * [family in WIRED]
    modules = [*model.modules()]
    norms = [module for module in modules if "RMSNorm" in type(module).__name__]
    assert all(norm_of(module) is not None for module in norms)
    gates = [gate_of(module) for module in modules if hasattr(module, "gate_proj")]
    assert None not in gates
    assert {found.activation for found in gates} <= {"gelu_tanh" if "gemma" in family else "silu"}
    turning = [module for module in modules if with_fused_rotation(type(module)) is not None]
    assert len(turning) == (0 if family in ("gpt2", "opt") else 2)
    torch.set_rng_state(before)


def test_a_trial_draws_no_random_numbers_and_needs_no_weights():
    model = families.random_model("gemma3")
    before = torch.get_rng_state()
    model = PackedModel(model.to("meta"))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(hasattr(layer, "fastp3o_wiring") for layer in model.layers())


@pytest.mark.parametrize("family", families.FAMILIES)
def test_fp32_keeps_every_bit_on_a_cpu(family, monkeypatch):
    found = [
        results(make(families.random_model(family)))
        for make in (PackedModel, lambda m: unfused(monkeypatch, m))
    ]
    for fused, plain in zip(*found, strict=True):
        assert torch.equal(fused, plain)


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "cohere"])
def test_kernels_are_as_exact_as_plain_layers(family, dtype, monkeypatch):
    exact = results(PackedModel(families.random_model(family).double()))
    plain = results(PackedModel(families.random_model(family).to(dtype)))
    model = PackedModel(families.random_model(family).to(dtype))
    with_kernels(monkeypatch)
    with counted_launches(monkeypatch) as launches:
        found = results(model)
    assert {"gate_kernel", "gate_gradient_kernel", "rotary_kernel"} <= set(launches)
    assert ("rms_norm_gradient_kernel" in launches) == (family != "cohere")
    floor = 2e-6 if dtype == torch.float32 else 0.0
    assert error(found, exact) <= 1.5 * error(plain, exact) + floor


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_autocast_takes_norms_of_the_stream_in_the_dtype_of_its_products(family, monkeypatch):
    """Rounded by the norm's kernel, and not once more by each product; gradients are as exact as
    plain layers'.
    """
    exact = results(PackedModel(families.random_model(family).double()))
    taken = set()

    def with_autocast(model):
        for layer in model.layers():
            for product in (layer.self_attn.q_proj, layer.mlp.gate_proj):
                product.register_forward_pre_hook(lambda _, inputs: taken.add(inputs[0].dtype))
        taken.clear()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return results(model)

    plain = with_autocast(PackedModel(families.random_model(family)))
    assert taken == {torch.float32}
    model = PackedModel(families.random_model(family))
    with_kernels(monkeypatch)
    found = with_autocast(model)
    assert taken == {torch.bfloat16}
    assert error(found, exact) <= 1.1 * error(plain, exact)
    assert (found[0] - exact[0]).abs().max() <= 1.5 * (plain[0] - exact[0]).abs().max()


@pytest.mark.parametrize("kernels", [False, True])
@pytest.mark.parametrize("family", ["gemma2", "gemma3"])
def test_a_stream_beyond_fp16_is_finite_and_right(family, kernels, monkeypatch):
    model = families.random_model(family)
    for layer in model.base_model.layers:
        layer.post_feedforward_layernorm.weight.data.add_(4e4)
    exact = labeled_logprobs(PackedModel(copy.deepcopy(model).double()), families.FOURS.row())
    plain = labeled_logprobs(
        unfused(monkeypatch, copy.deepcopy(model).half()), families.FOURS.row()
    )
    assert not plain.isfinite().all()
    model = PackedModel(model.half())
    if kernels:
        with_kernels(monkeypatch)
    found = results(model)
    assert (found[0] - exact).abs().max() < 0.05
    assert all(gradient.isfinite().all() for gradient in found)


@pytest.mark.parametrize(
    ("family", "dtype"),
    [("llama", torch.float16), ("llama", torch.bfloat16), ("gemma3", torch.bfloat16)],
)
def test_a_finer_stream_makes_logprobs_more_exact(family, dtype, monkeypatch):
    """Of a deep model, in which half precision rounds the stream with every block."""
    deep = {"num_hidden_layers": 16, "layer_types": 8 * ["sliding_attention", "full_attention"]}
    model = families.random_model(
        family, **deep if family == "gemma3" else {"num_hidden_layers": 16}
    )
    row = families.FOURS.row()
    with torch.no_grad():
        exact = labeled_logprobs(PackedModel(copy.deepcopy(model).double()), row)
        plain = labeled_logprobs(unfused(monkeypatch, copy.deepcopy(model).to(dtype)), row)
        found = labeled_logprobs(PackedModel(model.to(dtype)), row)
    errors = [(logprobs - exact).square().mean().sqrt().item() for logprobs in (found, plain)]
    assert errors[0] < 0.75 * errors[1], errors


@pytest.mark.parametrize("dtype", HALVES)
def test_activations_that_are_computed_again_have_the_same_bits(dtype, monkeypatch):
    for kernels in (False, True):
        if kernels:
            with_kernels(monkeypatch)
        model = PackedModel(families.random_model("gemma3").to(dtype)).train()
        kept = results(model)
        model.recompute_activations()
        for again, first in zip(results(model), kept, strict=True):
            assert torch.equal(again, first)


def test_a_copy_runs_its_own_parts():
    model = PackedModel(families.random_model("qwen3"))
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    assert results(model)[0].isfinite().all()
    assert labeled_logprobs(other, families.FOURS.row()).unique().numel() == 1


class Norm(nn.Module):
    def __init__(self, size=8):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), 1e-6

    def scale(self, x):
        return torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)

    def forward(self, x):
        return (x.float() * self.scale(x.float()) * self.weight.float()).to(x.dtype)


class Constant(Norm):
    """No gradient goes through its scale."""

    def forward(self, x):
        return x * self.scale(x).detach() * self.weight


class OtherEps(Norm):
    def scale(self, x):
        return 1 / (x.square().mean(-1, keepdim=True).sqrt() + self.eps)


class Centred(Norm):
    def forward(self, x):
        return super().forward(x - x.mean(-1, keepdim=True))


class Biased(Norm):
    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(8))


class WithGate(Norm):
    def forward(self, x, gate):
        return super().forward(x * gate)


def test_a_norm_of_any_name_is_recognized_and_no_other_function():
    assert norm_of(Norm()).kind == (1e-6, 0.0, False)
    assert [
        norm_of(other()) for other in (Constant, OtherEps, Centred, Biased, WithGate, nn.Identity)
    ] == 6 * [None]
    assert norm_of(nn.LayerNorm(8, bias=False)) is None


class FeedForward(nn.Module):
    def __init__(self, first=24, second=24):
        super().__init__()
        self.c, self.b, self.a = nn.Linear(second, 8), nn.Linear(8, second), nn.Linear(8, first)
        self.act = nn.GELU()

    def forward(self, x):
        return self.c(self.act(self.a(x)) * self.b(x))


class Clipped(FeedForward):
    def forward(self, x):
        return self.c(self.act(self.a(x)).clamp(max=0.5) * self.b(x))


def test_a_gate_of_any_names_is_recognized_and_no_other_function():
    assert gate_of(FeedForward()) == ("a", "b", "c", "gelu")
    square = FeedForward(8, 8)
    assert gate_of(square) == ("a", "b", "c", "gelu")
    square.act = nn.ReLU()
    assert gate_of(square) is None
    assert gate_of(Clipped()) is None


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("granite", {"residual_multiplier": 0.5}),  # what a block adds is scaled
        ("cohere", {}),  # both parts of a layer read the same norm
    ],
)
def test_layers_of_another_wiring_stay_as_they_are(family, changes, monkeypatch):
    model = families.random_model(family, **changes)
    plain = unfused(monkeypatch, copy.deepcopy(model).bfloat16())
    model = PackedModel(model.bfloat16())
    norms = {module: found for module in model.modules() if (found := norm_of(module)) is not None}
    assert [wiring_of(layer, norms) for layer in model.layers()] == [None, None]
    for found, expected in zip(results(model), results(plain), strict=True):
        assert torch.equal(found, expected)


def test_dropout_in_a_layer_leaves_it_as_it_is():
    config = families.UNGROUPED | {"pad_token_id": 0, "resid_pdrop": 0.1}
    torch.manual_seed(0)
    model = PackedModel(hf.AutoModelForCausalLM.from_config(hf.Phi3Config(**config)))
    assert not any(hasattr(layer, "fastp3o_wiring") for layer in model.layers())
    model = PackedModel(
        hf.AutoModelForCausalLM.from_config(hf.Phi3Config(**config | {"resid_pdrop": 0.0}))
    )
    assert all(hasattr(layer, "fastp3o_wiring") for layer in model.layers())


def test_a_forward_that_has_been_replaced_stays():
    """As by hooks that bring a module's weights; and a body that is tried once more is as it was."""
    inner = families.random_model("llama")
    norm = inner.base_model.layers[0].input_layernorm
    calls, forward = [], norm.forward
    norm.forward = lambda x: calls.append(x) or forward(x)
    model = PackedModel(inner)
    replaced = [(type(module), vars(module).get("forward")) for module in model.modules()]
    fused_layers.fuse(inner.base_model, model.layers())
    assert [(type(module), vars(module).get("forward")) for module in model.modules()] == replaced
    assert results(model)[0].isfinite().all()
    assert len(calls) == 1


LAUNCHES = "Pointer argument cannot be accessed from Triton (cpu tensor?)"


def launching(function, launched):
    """A function that others' kernels compute: it is counted, and takes tensors of a GPU alone
    until that is set.
    """

    @wraps(function)
    def patched(*args, **kwargs):
        if not launched["on a GPU"]:
            raise ValueError(LAUNCHES)
        launched[function.__qualname__] += 1
        return function(*args, **kwargs)

    return patched


@pytest.mark.parametrize("where", ["in the model's parts", "in the family's classes"])
def test_parts_with_another_librarys_kernels_keep_them(where, monkeypatch):
    """As Liger patches models, before or after they are loaded."""
    launched = Counter()
    family = hf.models.llama.modeling_llama
    classes = family.LlamaRMSNorm, family.LlamaMLP
    rotation = launching(family.apply_rotary_pos_emb, launched)
    monkeypatch.setattr(family, "apply_rotary_pos_emb", rotation)
    inner = families.random_model("llama")
    with_fused_rotation.cache_clear()
    parts = [module for module in inner.base_model.modules() if isinstance(module, classes)]
    if where == "in the model's parts":
        for part in parts:
            part.forward = MethodType(launching(type(part).forward, launched), part)
    else:
        for kind in classes:
            monkeypatch.setattr(kind, "forward", launching(kind.forward, launched))
    model = PackedModel(inner)
    assert not any(hasattr(layer, "fastp3o_wiring") for layer in model.layers())
    for layer in model.layers():
        fused_layers.without_replaced_parts(layer)  # as before a compiler
    launched["on a GPU"] = True
    labeled_logprobs(model, families.FOURS.row())
    del launched["on a GPU"]
    with_fused_rotation.cache_clear()
    assert launched == {"LlamaRMSNorm.forward": 5, "LlamaMLP.forward": 2, "apply_rotary_pos_emb": 2}
