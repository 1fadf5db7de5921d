"""Every operation of torch on the pretended device, by CUDA's rules.

An operation runs on the values in CPU memory. Before that it is checked (a CPU tensor of one
dimension or more beside one on the device raises; so do two devices), and noted as a launch, or as
a wait where torch's CUDA code reads a result on the host.
"""

import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from tests.simulated_cuda import host as on_host
from tests.simulated_cuda.host import host, note_launch, place, wait_for_device
from tests.simulated_cuda.native import library, memory_of
from tests.simulated_cuda.stand_ins import STAND_INS, attention, attention_backward, fused
from tests.simulated_cuda.tensors import is_simulated, on_device, values_in

aten = torch.ops.aten

# torch's CUDA code reads the size or the validity of their results on the host.
WAITS = (
    "_local_scalar_dense",
    "_unique2",
    "bincount",
    "equal",
    "is_nonzero",
    "masked_select",
    "multinomial",
)
WAITS += ("nonzero", "unique_consecutive", "unique_dim")
# They neither launch nor are views by their schemas.
NO_LAUNCH = (
    "_reshape_alias",
    "_unsafe_view",
    "detach",
    "empty",
    "empty_like",
    "empty_strided",
    "is_pinned",
)
NO_LAUNCH += ("new_empty", "new_empty_strided", "resize_", "set_")
# They raise under `torch.use_deterministic_algorithms`, products without cuBLAS's setting.
NOT_DETERMINISTIC = (
    "cumprod",
    "cumsum",
    "histc",
    "kthvalue",
    "median",
    "nll_loss2d_forward",
    "put_",
)
PRODUCTS = ("addmm", "baddbmm", "bmm", "mm")
INDEXES = ("_index_put_impl_", "index", "index_put", "index_put_")
# They take a number in a CPU tensor although they are not elementwise by their tags.
TAKE_NUMBERS = ("fill", "fill_", "masked_fill", "masked_fill_")


class SimulatedDevice(TorchDispatchMode):
    """While it is active, operations on SimulatedTensors, and those that ask for a CUDA device, are
    the device's.
    """

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        return run_operation(function, args, kwargs or {})


def run_operation(function: Any, args: tuple, kwargs: dict) -> Any:
    if function is torch.ops.prim.device.default:
        return args[0].simulated_device
    tensors = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
    simulated = [tensor for tensor in tensors if is_simulated(tensor)]
    asked = cuda_device(kwargs.get("device"))
    if not simulated and asked is None:
        with torch._C._DisableTorchDispatch():
            return function(*args, **kwargs)
    name = function.overloadpacket.__name__
    if function is aten._to_copy.default:
        return to_copy(*args, **kwargs)
    if function is aten.copy_.default:
        return copy_(*args, **kwargs)
    if function is aten.set_.source_Storage_storage_offset:
        return set_memory(*args)
    if name in ("lift_fresh", "lift"):
        return args[0]
    if function is aten.is_pinned.default:
        return False
    assert name not in ("_pin_memory", "pin_memory"), "only memory of the host can be pinned"
    device = simulated[0].simulated_device if simulated else asked
    check_devices(name, function, tensors, device)
    if torch.are_deterministic_algorithms_enabled():
        unset = name in PRODUCTS and "CUBLAS_WORKSPACE_CONFIG" not in os.environ
        if unset or (name in NOT_DETERMINISTIC and tensors[0].is_floating_point()):
            raise RuntimeError(f"{name} is not deterministic (at {place()})")
    for kind in waits(name, args, kwargs):
        wait_for_device(kind)
    launched = not function.is_view and name not in NO_LAUNCH
    if launched:
        note_launch(str(function))
    changed = {"device": torch.device("cpu"), "pin_memory": False}
    kwargs = {
        key: changed.get(key, value) if value is not None else value
        for key, value in kwargs.items()
    }
    written = written_by(function, args, kwargs)
    function = STAND_INS.get(str(function), function)
    return execute(function, args, kwargs, device, launched=launched, written=written)


def execute(
    function: Callable,
    args: tuple,
    kwargs: dict,
    device: torch.device,
    *,
    launched: bool,
    written: list[Tensor],
) -> Any:
    """Runs a function on the values of its arguments. What it returns is on the device; a tensor
    that it changed in place is the one that was given. written: the tensors it writes to.
    """
    given: dict[int, tuple[Tensor, Tensor]] = {}

    def lower(value: Any) -> Any:
        if not is_simulated(value):
            return value
        values = values_in(value)
        given[id(values)] = values, value
        return values

    def lift(value: Any) -> Any:
        if not isinstance(value, Tensor) or value.device.type != "cpu":
            return value
        values, tensor = given.get(id(value), (None, None))
        return on_device(value, device) if tensor is None else of_same_shape(tensor, values)

    if launched:
        for record in on_host.records:
            record.devices[str(device)] += 1
    low_args, low_kwargs = tree_map(lower, (args, kwargs))
    if host.capture is not None:
        if launched and device.index != host.capture.device:
            raise RuntimeError(
                f"a launch on {device} in a capture on cuda:{host.capture.device} (at {place()})"
            )
        host.capture.keep_contents([values_in(tensor) for tensor in written])
    with (
        memory_of(device),
        torch.inference_mode(False),
        torch.no_grad(),
        torch._C._DisableTorchDispatch(),
    ):
        result = function(*low_args, **low_kwargs)
    if host.capture is not None:
        host.capture.add(function, low_args, low_kwargs, result, launched=launched)
    return tree_map(lift, result)


def of_same_shape(tensor: Tensor, values: Tensor) -> Tensor:
    """An operation in place may have resized."""
    if tensor.size() != values.size() or tensor.stride() != values.stride():
        with torch._C._DisableTorchDispatch():
            tensor.set_(
                values.untyped_storage(), values.storage_offset(), values.size(), values.stride()
            )
    return tensor


def set_memory(tensor: Tensor, *memory: Any) -> Tensor:
    """`Tensor.set_`. memory: a storage, and offset, sizes and strides in it."""
    with torch.inference_mode(False), torch._C._DisableTorchDispatch():
        values = torch.empty(0, dtype=tensor.dtype).set_(*memory)
    tensor.data = on_device(values, tensor.simulated_device)
    return tensor


def cuda_device(device: Any) -> torch.device | None:
    """The CUDA device, with its number, that an operation asks for; None for others."""
    if device is None or (device := torch.device(device)).type != "cuda":
        return None
    return torch.device(
        "cuda", library().current_device() if device.index is None else device.index
    )


def check_devices(name: str, function: Any, tensors: list[Tensor], device: torch.device) -> None:
    numbers = torch.Tag.pointwise in function.tags or name in TAKE_NUMBERS
    for tensor in tensors:
        found = tensor.simulated_device if is_simulated(tensor) else tensor.device
        number = found.type == "cpu" and (name in INDEXES or (tensor.dim() == 0 and numbers))
        if found != device and found.type != "meta" and not number:
            raise RuntimeError(
                "Expected all tensors to be on the same device, but found at least two devices, "
                f"{found} and {device}! ({name} at {place()})"
            )


def waits(name: str, args: tuple, kwargs: dict) -> Iterator[str]:
    """Reasons for which the host waits in this operation."""
    if name in WAITS:
        yield name
    if name == "repeat_interleave" and kwargs.get("output_size") is None:
        yield "repeat_interleave without output_size"
    if name == "segment_reduce" and not kwargs.get("unsafe", False):
        yield "segment_reduce checks its lengths"
    tensors = name == "isin" and all(isinstance(values, Tensor) for values in args[:2])
    # From so many on torch sorts both, and asks for the number of different ones.
    if tensors and args[1].numel() >= 10 * args[0].numel() ** 0.145:
        yield "isin of many"
    if name in INDEXES:
        indices = [index for index in args[1] if index is not None]
        # One mask with one number is a masked_fill.
        filled = "index_put" in name and len(args[1]) == 1 and args[2].numel() == 1
        if any(index.dtype in (torch.bool, torch.uint8) for index in indices) and not filled:
            yield f"{name} with a mask"
        if not all(map(is_simulated, indices)):
            yield f"{name} with indices on the CPU"


def written_by(function: Any, args: tuple, kwargs: dict) -> list[Tensor]:
    if host.capture is None:
        return []
    arguments = function._schema.arguments
    named = dict(zip((argument.name for argument in arguments), args, strict=False)) | kwargs
    given = [
        named.get(a.name) for a in arguments if a.alias_info is not None and a.alias_info.is_write
    ]
    return [tensor for tensor in tree_leaves(given) if isinstance(tensor, Tensor)]


def to_copy(
    source: Tensor, *, device: Any = None, non_blocking: bool = False, **options: Any
) -> Tensor:
    """`Tensor.to`. A copy to the host that nobody waits for goes to pinned memory, as torch's does."""
    options.pop("pin_memory", None)
    target = cuda_device(device)
    if target is None and device is not None and torch.device(device).type == "meta":
        return torch.empty_like(values_in(source), device="meta", **options)
    if target is None and device is None and is_simulated(source):
        target = source.simulated_device
    note_launch("copy")
    if is_simulated(source) and target is not None:
        return execute(aten._to_copy.default, (source,), options, target, launched=True, written=[])
    if target is None:  # to the host
        values = converted(values_in(source), options)
        if not non_blocking or host.capture is not None:
            wait_for_device("copy to the host")
            return values.clone() if values is source else values
        result = torch.empty_like(values, pin_memory=values.numel() > 0)
        on_host.copy_to_host_later(result, values.clone())
        return result
    with memory_of(target):
        values = converted(source, options, clone=True)
    result = on_device(values, target)
    upload(source, non_blocking)
    return result


def converted(source: Tensor, options: dict, *, clone: bool = False) -> Tensor:
    with torch.inference_mode(False), torch.no_grad(), torch._C._DisableTorchDispatch():
        return aten._to_copy.default(source, **options) if options or clone else source


def upload(source: Tensor, non_blocking: bool) -> None:
    """The host waits for a copy to the device, unless it is from pinned memory and does not block."""
    if not source.is_pinned():
        wait_for_device("copy of pageable memory to the device")
    elif not non_blocking:
        wait_for_device("copy to the device that blocks")
    else:
        with torch.no_grad(), torch._C._DisableTorchDispatch():
            on_host.copy_to_device_later(source)


def copy_(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    note_launch("copy")
    if is_simulated(target) and not is_simulated(source):
        upload(source, non_blocking)
    elif not is_simulated(target):
        if non_blocking and target.is_pinned() and host.capture is None:
            with torch.no_grad(), torch._C._DisableTorchDispatch():
                on_host.copy_to_host_later(
                    target, values_in(source).to(target.dtype).expand(target.shape).clone()
                )
            return target
        wait_for_device("copy to the host")
    device = target.simulated_device if is_simulated(target) else source.simulated_device
    execute(aten.copy_.default, (target, source), {}, device, launched=True, written=[target])
    return target


class Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, options: dict
    ) -> Tensor:
        # Kernels that keep no products of queries and keys take groups only in half precision and
        # without a mask.
        fused_kernel = query.shape[1] == key.shape[1] or (
            query.dtype.itemsize == 2 and mask is None
        )
        kept = (
            None
            if fused_kernel
            else query.new_empty(*query.shape[:3], key.shape[2], dtype=torch.float32)
        )
        ctx.save_for_backward(query, key, value, mask, kept)
        ctx.options = options
        return launched_attention(attention, query.device, query, key, value, mask, options)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:
        inputs = *ctx.saved_tensors[:4], ctx.options
        return *launched_attention(attention_backward, grad.device, grad, *inputs), None, None


def launched_attention(function: Callable, device: torch.device, *args: Any) -> Any:
    note_launch(function.__name__)
    return execute(function, args, {}, device, launched=True, written=[])


def scaled_dot_product_attention(
    query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, **options
):
    options["is_causal"] = is_causal
    if not is_simulated(query):
        return fused(query, key, value, attn_mask, dropout_p, **options)
    assert dropout_p == 0.0
    return Attention.apply(query, key, value, attn_mask, options)
