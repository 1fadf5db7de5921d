import math
import re
import sys
from functools import partial
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from benchmarks.peak_memory import PeakMemory
from fastp3o.errors import UserError
from fastp3o.models import attention
from fastp3o.models.attention import (
    choose_attention,
    fastest_backend,
    sdpa_per_segment,
    segment_attention,
)
from fastp3o.packing.packed_row import Segments, offsets
from tests.fastp3o.models.model_families import PAIRS


def make_segments(lengths: list[tuple[int, int]]) -> Segments:
    queries, keys = [q for q, _ in lengths], [k for _, k in lengths]
    return Segments(offsets(queries), offsets(keys), tuple(queries), tuple(keys), None)


def random_tensors(
    segments: Segments, heads: int, groups: int, size: int, dtype=torch.float64
) -> list[Tensor]:
    """Queries [T, H, D], keys and values [U, Hkv, D]."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(sum(segments.query_lengths), heads, size)] + 2 * [
        (sum(segments.key_lengths), heads // groups, size)
    ]
    return [
        torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes
    ]


def dense(query, key, value, segments, scale, window, softcap) -> Tensor:
    """Every query against every key of the row, most of them masked."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    segment_of_query = torch.tensor(
        [g for g, length in enumerate(segments.query_lengths) for _ in range(length)]
    )
    segment_of_key = torch.tensor(
        [g for g, length in enumerate(segments.key_lengths) for _ in range(length)]
    )
    lengths = list(zip(segments.query_lengths, segments.key_lengths, strict=True))
    position_of_query = torch.tensor([k - q + i for q, k in lengths for i in range(q)])
    position_of_key = torch.tensor([i for _, k in lengths for i in range(k)])
    distance = position_of_query[:, None] - position_of_key
    visible = (segment_of_query[:, None] == segment_of_key) & (distance >= 0)
    if window is not None:
        visible &= distance < window
    products = scale * torch.einsum("thd,uhd->htu", query, key)
    if softcap:
        products = softcap * torch.tanh(products / softcap)
    weights = products.masked_fill(~visible, -math.inf).softmax(-1)
    return torch.einsum("htu,uhd->thd", weights, value)


def with_gradients(attend, tensors, *options) -> list[Tensor]:
    leaves = [tensor.detach().clone().requires_grad_() for tensor in tensors]
    output = attend(*leaves, *options)
    weights = torch.linspace(
        -1, 1, output.numel(), dtype=torch.float64, device=output.device
    ).view_as(output)
    output.backward(weights.to(output.dtype))
    return [output.detach(), *(leaf.grad for leaf in leaves)]


one_segment = st.tuples(st.integers(1, 6), st.integers(0, 5)).map(
    lambda lengths: (lengths[0], sum(lengths))
)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(one_segment, min_size=1, max_size=4),
    st.sampled_from([1, 2]),
    st.none() | st.integers(1, 8),
    st.none() | st.just(0.7),
    st.sampled_from([1, 24, attention.LARGEST_BLOCK]),
    st.sampled_from([0, attention.LARGEST_PADDED]),
)
def test_segments_one_by_one_or_padded_equal_a_dense_mask(
    lengths, groups, window, softcap, block, padded
):
    segments = make_segments(lengths)
    tensors = random_tensors(segments, 2, groups, 4)
    with mock.patch.multiple(attention, LARGEST_BLOCK=block, LARGEST_PADDED=padded):
        got = with_gradients(sdpa_per_segment, tensors, segments, 0.8, window, softcap)
    expected = with_gradients(dense, tensors, segments, 0.8, window, softcap)
    # With soft capping the softmax is fp32, as transformers' is.
    tolerance = 1e-12 if softcap is None else 2e-6
    for tensor, expected_tensor in zip(got, expected, strict=True):
        torch.testing.assert_close(tensor, expected_tensor, atol=tolerance, rtol=tolerance)


on_gpu = partial(pytest.param, marks=pytest.mark.gpu)


@pytest.mark.parametrize(
    ("kind", "softcap"), [("cpu", 30.0), on_gpu("cuda", None), on_gpu("cuda", 30.0)]
)
@pytest.mark.parametrize("window", [None, 20])
def test_products_of_queries_and_keys_are_not_kept_for_the_backward_pass(kind, softcap, window):
    segments = make_segments([(64, 64), (48, 96)])
    tensors = [
        tensor.to(kind).requires_grad_()
        for tensor in random_tensors(segments, 4, 2, 8, torch.float32)
    ]
    with PeakMemory() as memory:
        result = sdpa_per_segment(*tensors, segments, 0.3, window, softcap)
    assert (
        sum(size for storage, size in memory.alive.values() if not storage.expired())
        == result.nbytes
    )
    assert softcap or memory.largest <= 2 * result.nbytes


def test_a_packed_row_has_a_scale_of_one_over_the_root_and_anything_else_is_refused():
    row = PAIRS.row()
    query, key, value = torch.randn(
        3, 1, 2, row.tokens, 4, generator=torch.Generator().manual_seed(0)
    )
    tensors = query, key[:, :1], value[:, :1]
    packed = {"attention_mask": None, "fastp3o_segments": row.segments}
    scaled = [
        segment_attention(nn.Module(), *tensors, **packed, scaling=scale)[0]
        for scale in (None, 0.5, 0.7)
    ]
    assert torch.equal(*scaled[:2])
    assert not torch.allclose(*scaled[1:])
    for changes in (
        {"fastp3o_segments": None},
        {"attention_mask": torch.ones(1, row.tokens)},
        {"dropout": 0.1},
    ):
        with pytest.raises(
            ValueError, match=r"one packed row with its segments|dropout of attention weights"
        ):
            segment_attention(nn.Module(), *tensors, **(packed | changes))
    with pytest.raises(ValueError, match="one packed row"):
        segment_attention(nn.Module(), *(t.repeat(2, 1, 1, 1) for t in tensors), **packed)


@pytest.mark.parametrize(
    ("dtype", "size", "softcap", "with_flash", "without"),
    [
        (torch.float16, 64, None, "by_flash_attn", "by_varlen_attn"),
        (torch.bfloat16, 256, None, "by_flash_attn", "by_varlen_attn"),
        (torch.bfloat16, 64, 30.0, "by_flash_attn", "sdpa_per_segment"),
        (torch.bfloat16, 20, None, "by_flash_attn", "sdpa_per_segment"),
        (torch.bfloat16, 264, None, "sdpa_per_segment", "sdpa_per_segment"),
        (torch.float32, 64, None, "sdpa_per_segment", "sdpa_per_segment"),
    ],
)
def test_the_fastest_backend_that_can_is_taken(
    monkeypatch, dtype, size, softcap, with_flash, without
):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    attention.libraries_support.cache_clear()
    query = SimpleNamespace(
        dtype=dtype, shape=(8, 2, size), is_cuda=True, device=torch.device("cuda", 0)
    )
    for installed, expected in ((lambda: None, with_flash), (None, without)):
        monkeypatch.setattr(attention, "flash_attn_varlen_func", installed)
        assert fastest_backend(query, softcap).__name__ == expected
    # A GPU that is too old for both.
    monkeypatch.setattr(attention, "flash_attn_varlen_func", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    attention.libraries_support.cache_clear()
    assert fastest_backend(query, softcap) is sdpa_per_segment
    attention.libraries_support.cache_clear()


LOADED = [("hub", 8, "2"), ("hub", 9, "3"), ("fa3", 9, "FA3"), ("fa4", 10, "FA4")]


@pytest.mark.parametrize(("name", "major", "loads"), LOADED)
def test_chosen_kernels_are_those_of_all_models_until_others_are_chosen(
    monkeypatch, name, major, loads
):
    loaded, kernel = [], SimpleNamespace(flash_attn_varlen_func="the hub's")
    hub = SimpleNamespace(
        get_kernel=lambda repository, revision: loaded.append(repository[-1]) or kernel
    )
    monkeypatch.setitem(sys.modules, "kernels", hub)
    monkeypatch.setattr(attention, "flash_attn_varlen_func", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (major, 0))
    monkeypatch.setattr(torch, "__version__", "2.13.1+cu130")
    with mock.patch.multiple(
        attention,
        activate_flash_attention_impl=loaded.append,
        current_flash_attention_impl=loaded.copy,
        restore_flash_attention_impl=loaded.clear,
    ):
        choose_attention(name, torch.device("cuda"))
        assert (loaded, attention.flash_attn_varlen_func) == (
            [loads],
            "the hub's" if name == "hub" else None,
        )
        choose_attention("auto", torch.device("cuda"))
        assert (loaded, attention.flash_attn_varlen_func) == ([], attention.installed_flash_attn)
    with pytest.raises(ValueError, match=f"attention {name} needs a GPU"):
        choose_attention(name, torch.device("cpu"))
    if name == "hub":
        monkeypatch.setitem(sys.modules, "kernels", None)
        with pytest.raises(
            ValueError, match=r"hub: the package `kernels` is missing .*: pip install '\.\[flash\]'"
        ):
            choose_attention(name, torch.device("cuda"))


@pytest.mark.parametrize("version", ["2.10.0", "2.14.0+cu130", "2.15.1.dev20261101", "3.0.0"])
def test_a_torch_for_which_the_hub_has_no_build_is_told_which_it_has(monkeypatch, version):
    hub = SimpleNamespace(
        get_kernel=lambda *_, **__: pytest.fail("looked for a build that does not exist")
    )
    monkeypatch.setitem(sys.modules, "kernels", hub)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch, "__version__", version)
    said = rf"attention hub: \S*flash-attn3 has builds for torch 2\.11 to 2\.13, and this is {re.escape(version)}; "
    with pytest.raises(UserError, match=said) as error:
        choose_attention("hub", torch.device("cuda"))
    assert "[flash]" not in str(error.value)


LENGTHS = [(3, 3), (1, 4), (5, 9), (2, 2)]


def by_offsets(
    query, key, value, cu_queries, cu_keys, longest_query, longest_keys, scale, left, softcap
) -> Tensor:
    """A stand-in for both libraries: causal at the end of the keys, `left` further keys seen, all
    if negative.
    """
    assert (longest_query, longest_keys) == (5, 9)
    assert cu_queries.dtype == cu_keys.dtype == torch.int32
    lengths = list(zip(cu_queries.diff().tolist(), cu_keys.diff().tolist(), strict=True))
    assert lengths == LENGTHS
    return dense(
        query, key, value, make_segments(lengths), scale, None if left < 0 else left + 1, softcap
    )


@pytest.mark.parametrize(
    ("library", "softcap"),
    [("flash_attn", None), ("flash_attn", 30.0), ("varlen_attn", None), ("older", None)],
)
@pytest.mark.parametrize("window", [None, 3, 1])
def test_libraries_are_called_as_they_document(monkeypatch, window, library, softcap):
    segments = make_segments(LENGTHS)
    tensors = random_tensors(segments, 4, 2, 4)
    left, calls = -1 if window is None else window - 1, []

    def flash_attn(*given, softmax_scale, causal, window_size, softcap, deterministic):
        assert causal
        assert window_size == (left, -1 if window is None else 0)
        calls.append(deterministic)
        result = by_offsets(*given, softmax_scale, left, softcap)
        return result if softcap else (result, None)  # as a build of flash-attn 3

    # Older versions of torch have no option for groups, and take them: repeated keys would be kept.
    def older(query, key, *given, scale, window_size):
        assert window_size == (left, 0)  # a right side of 0 makes it causal
        calls.append(key.shape[1])
        return by_offsets(query, key, *given, scale, left, None)

    def varlen_attn(*given, enable_gqa=False, **options):
        assert enable_gqa
        return older(*given, **options)

    monkeypatch.setattr(attention, "flash_attn_varlen_func", flash_attn)
    monkeypatch.setattr(attention, "varlen_attn", older if library == "older" else varlen_attn)
    attend = attention.by_flash_attn if library == "flash_attn" else attention.by_varlen_attn
    got = attend(*tensors, segments, 0.3, window, softcap)
    torch.testing.assert_close(got, sdpa_per_segment(*tensors, segments, 0.3, window, softcap))
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    attend(*tensors, segments, 0.3, window, softcap)
    assert calls == ([False, True] if library == "flash_attn" else [2, 2])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize(
    ("backend", "softcap"), [("varlen", None), ("flash", None), ("flash", 20.0)]
)
def test_libraries_equal_segments_one_by_one(backend, dtype, window, softcap, device):
    library = {"varlen": "varlen_attn", "flash": "flash_attn_varlen_func"}[backend]
    if getattr(attention, library) is None:
        pytest.skip(f"{library} is not installed")
    segments = make_segments([(37, 37), (1, 4), (5, 130), (64, 64), (1, 1)]).to(device)
    rounded = [tensor.to(device) for tensor in random_tensors(segments, 4, 2, 64, dtype)]
    options = segments, 0.125, window, softcap
    got = with_gradients(getattr(attention, f"by_{backend}_attn"), rounded, *options)
    expected = with_gradients(sdpa_per_segment, [tensor.double() for tensor in rounded], *options)
    for tensor, exact in zip(got, expected, strict=True):
        assert tensor.dtype == dtype
        assert (tensor.double() - exact).norm() < 0.01 * exact.norm()
