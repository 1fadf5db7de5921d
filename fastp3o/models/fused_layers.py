"""A model's norms, rotary positions, gates and residual sums in one kernel each, and its residual
stream in fp32.

A part is replaced by what it computes, and a trial finds out what that is: its structure suggests
formulas, and a small copy of it with random weights must give what one of them gives, and the same
gradients, within rounding. No family is named, and what fits no formula stays as it is. The trial
needs neither the model's weights nor its device, so that all processes come to the same end.

    norm       one vector of weights, and an eps                           `rms_norm`
    gate       two layers of one shape, one back, and an activation        `gated`
    attention  names a function of (q, k, cos, sin) in its forward         `rotate`
    layer      an attention, a feed-forward part, and two or four norms    `wired`

Where no kernels run, on a CPU and in what torch compiles, the parts compute as transformers wrote
them, in fp32 to the bit. Layers whose wiring is known keep the residual stream in fp32 where
weights are in half precision, with kernels and without: norms read it and write the weights' dtype,
and what a block computed is added to it without a rounding. So branches that are small next to the
stream lose no digits, and in fp16 it does not overflow.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from itertools import permutations, product
from types import FunctionType, MethodType
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fastp3o_kernels.layers import (
    ACTIVATIONS,
    NormKind,
    add_and_norm,
    gated,
    norm_and_add,
    rms_norm,
    rotate,
)
from fastp3o_kernels.operation import use_triton

# Sizes of a trial.
TOKENS, HIDDEN, INTERMEDIATE, HEADS, HEAD_SIZE = 5, 8, 12, 3, 16
# Largest difference next to the largest value, of fp32.
TOLERANCE = 1e-5
ANGLES = ["q", "k", "cos", "sin"]  # the first parameters of a function that turns queries and keys


# --- what is found of a layer ---------------------------------------------------------------------


class Norm(NamedTuple):
    """An RMSNorm, with the name of its weight."""

    kind: NormKind
    weight: str


class Gate(NamedTuple):
    """The names of a feed-forward part's layers: down(activation(gate(x)) * up(x))."""

    gate: str
    up: str
    down: str
    activation: str


class Wiring(NamedTuple):
    """The names of a layer's parts. norms: before each of the two; or before and behind each of
    them. keywords: the layer's, beside the hidden states, in order. unused: those of them that its
    attention does not get.
    """

    attention: str
    feed_forward: str
    norms: tuple[str, ...]
    kinds: tuple[Norm, ...]
    keywords: tuple[str, ...]
    unused: frozenset[str]


# --- replacing what a layer runs ------------------------------------------------------------------


def fuse(body: nn.Module, layers: nn.ModuleList | None) -> None:
    """Replaces what a trial recognizes in a model's body, but no forward that has been replaced
    before, here or by others' hooks. layers: None if they are not known.
    """
    modules = [module for module in body.modules() if "forward" not in vars(module)]
    norms = {module: norm for module in modules if (norm := norm_of(module)) is not None}
    wirings = [wiring_of(layer, norms) for layer in layers or ()]
    # What comes behind the last layer must take the stream, too.
    beside = {
        child
        for module in body.modules()
        if layers in [*module.children()]
        for child in module.children()
    }
    if wirings and all(wirings) and len(beside & set(norms)) == 1:
        for layer, wiring in zip(layers or (), wirings, strict=True):
            vars(layer)["fastp3o_wiring"] = wiring
            layer.__class__ = wired_class(cast(Any, type(layer)))
    for module, norm in norms.items():
        replace(module, partial(normed, norm=norm))
    for module in modules:
        if (gate := gate_of(module)) is not None:
            replace(module, partial(fed_forward, gate=gate))
        if (attention := with_fused_rotation(cast(Any, type(module)))) is not None:
            replace(module, attention)


def replace(module: nn.Module, forward: Callable[..., Any]) -> None:
    """An attribute leaves the module's hooks and names as they are. A copy of a module runs its
    copied parts.
    """
    vars(module).update(forward=MethodType(forward, module), fastp3o_replaced=True)


@cache
def wired_class(kind: Any) -> Any:
    """The class of layers with `wired` as its forward: gradient checkpointing is part of a class's
    forward.
    """
    return type(kind.__name__, (kind,), {"__module__": kind.__module__, "forward": wired})


def without_replaced_parts(layer: nn.Module) -> None:
    """A compiler fuses what is inside a layer itself. A forward of others stays."""
    for module in layer.modules():
        if vars(module).pop("fastp3o_replaced", False):
            del vars(module)["forward"]


# ---- what the parts compute


# --- what runs in its place -----------------------------------------------------------------------


def runs_kernels(*tensors: Tensor) -> bool:
    """Whether these are whole tensors on a GPU with Triton, and no compiler is looking."""
    if torch.compiler.is_compiling() or any(isinstance(tensor, DTensor) for tensor in tensors):
        return False
    return use_triton(None, *tensors)


def normed(module: Any, x: Tensor, *, norm: Norm) -> Tensor:
    """As the module's class does, but in the weight's dtype for a stream that is finer."""
    weight = getattr(module, norm.weight)
    finer = x.dtype.itemsize > weight.dtype.itemsize
    if (finer or x.dtype == weight.dtype) and runs_kernels(x, weight):
        return rms_norm(x, weight, norm.kind, dtype=weight.dtype)
    result = type(module).forward(module, x)
    return result.to(weight.dtype) if finer else result


def fed_forward(module: Any, x: Tensor, *, gate: Gate) -> Tensor:
    if not runs_kernels(x):
        return type(module).forward(module, x)
    products = getattr(module, gate.gate)(x), getattr(module, gate.up)(x)
    return getattr(module, gate.down)(gated(*products, gate.activation))


def rotated(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    *rest: Any,
    family_function: Callable[..., Any],
    interleaved: bool,
    unsqueeze_dim: int = 1,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """family_function: what packed rows [1, H, T, D] on a GPU go without."""
    packed = (
        unsqueeze_dim in (1, 2)
        and cos.shape[:2] == (len(q), q.shape[3 - unsqueeze_dim])
        and len(q) == 1
    )
    if rest or options or not packed or not runs_kernels(q, k, cos, sin):
        return family_function(q, k, cos, sin, *rest, unsqueeze_dim=unsqueeze_dim, **options)
    heads_last = unsqueeze_dim == 2
    # An index would be a copy of zeros in the backward pass.
    query, key = (x.squeeze(0) if heads_last else x.squeeze(0).transpose(0, 1) for x in (q, k))
    turned = rotate(query, key, cos.squeeze(0), sin.squeeze(0), interleaved=interleaved)
    query, key = (x.unsqueeze(0) if heads_last else x.transpose(0, 1).unsqueeze(0) for x in turned)
    return query, key


def wired(layer: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """A layer's forward, with the stream in fp32 at least."""
    wiring: Wiring = layer.fastp3o_wiring
    kwargs |= dict(zip(wiring.keywords, args, strict=False))
    passed = {name: value for name, value in kwargs.items() if name not in wiring.unused}
    norms = [
        (getattr(layer, name), norm) for name, norm in zip(wiring.norms, wiring.kinds, strict=True)
    ]
    attention, feed_forward = getattr(layer, wiring.attention), getattr(layer, wiring.feed_forward)
    stream = hidden_states.to(torch.promote_types(hidden_states.dtype, torch.float32))

    # Like Llama: a norm before each of the two parts.
    if len(norms) == 2:
        before_attention, before_feed_forward = norms
        stream, x = added_and_normed(stream, None, *before_attention)
        branch = attention(hidden_states=x, **passed)[0]
        stream, x = added_and_normed(stream, branch, *before_feed_forward)
        return stream + feed_forward(x)

    # Like Gemma 2: a norm after each of them, too.
    before_attention, after_attention, before_feed_forward, after_feed_forward = norms
    stream, x = added_and_normed(stream, None, *before_attention)
    branch = attention(hidden_states=x, **passed)[0]
    stream = normed_and_added(branch, stream, *after_attention)
    stream, x = added_and_normed(stream, None, *before_feed_forward)
    return normed_and_added(feed_forward(x), stream, *after_feed_forward)


def added_and_normed(
    stream: Tensor, branch: Tensor | None, module: Any, norm: Norm
) -> tuple[Tensor, Tensor]:
    """The sum, and it normalized in the weight's dtype. Under autocast a kernel writes the dtype of
    the products, which would each round it for themselves.
    """
    weight = getattr(module, norm.weight)
    if runs_kernels(stream, weight):
        device = stream.device.type
        dtype = (
            torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
        )
        return add_and_norm(stream, branch, weight, norm.kind, dtype=dtype)
    total = stream if branch is None else stream + branch
    return total, normed(module, total, norm=norm)


def normed_and_added(branch: Tensor, stream: Tensor, module: Any, norm: Norm) -> Tensor:
    """The sum, with a branch that is normalized in the stream's dtype."""
    weight = getattr(module, norm.weight)
    if runs_kernels(stream, weight):
        return norm_and_add(branch, stream, weight, norm.kind)
    return stream + type(module).forward(module, branch.to(stream.dtype)).to(stream.dtype)


# ---- which parts compute it


# --- finding norms and gates ----------------------------------------------------------------------


def norm_of(module: nn.Module) -> Norm | None:
    """The norm that a module computes, if it is one."""
    parameters = module._parameters
    if len(parameters) != 1 or module._modules or module._buffers:
        return None
    ((name, weight),) = parameters.items()
    if weight is None or weight.dim() != 1:
        return None

    def part(x: Tensor, weight: Tensor) -> Tensor:
        return type(module).forward(shadow(module, _parameters={name: weight}), x)

    # Which of the module's numbers is eps, and whether its weight is an offset from 1, is tried out.
    for eps in {value for value in vars(module).values() if type(value) is float}:
        # Rows from far below the root of eps to far above it.
        scales = torch.tensor([[1e-2], [0.3], [1.0], [3.0], [1e3]], device="cpu")
        x = numbers(TOKENS, HIDDEN) * scales * abs(eps) ** 0.5
        scale = numbers(HIDDEN, seed=1)
        for offset in (0.0, 1.0):
            rounding = NormKind(eps, offset, rounds=True)
            exact = NormKind(eps, offset, rounds=False)
            formula = partial(rms_norm, kind=rounding, impl="eager")
            if computes_the_same(part, formula, x, scale):
                return Norm(nearer_in_bf16(part, (rounding, exact), x, scale), name)
    return None


def nearer_in_bf16(
    part: Callable[[Tensor, Tensor], Tensor], kinds: Sequence[NormKind], x: Tensor, weight: Tensor
) -> NormKind:
    """The first of the kinds whose results in bf16 are nearest to the module's, which shows where
    it rounds.
    """
    x, weight = x.bfloat16(), weight.bfloat16()

    def error(kind: NormKind) -> float:
        return (part(x, weight) - rms_norm(x, weight, kind, impl="eager")).abs().sum().item()

    return min(kinds, key=error)


def gate_of(module: nn.Module) -> Gate | None:
    """The gate that a module computes, if it is a feed-forward part with one."""
    layers = {
        name: child for name, child in module.named_children() if isinstance(child, nn.Linear)
    }
    others = [child for name, child in module.named_children() if name not in layers]
    if len(layers) != 3 or module._parameters or any([*child.parameters()] for child in others):
        return None
    sizes = {name: (layer.in_features, layer.out_features) for name, layer in layers.items()}
    for (gate, up, down), activation in product(permutations(layers), ACTIVATIONS):
        candidate = Gate(gate, up, down, activation)
        if sizes[gate] == sizes[up] == sizes[down][::-1] and computes_gate(module, candidate):
            return candidate
    return None


def computes_gate(module: nn.Module, gate: Gate) -> bool:
    def part(x: Tensor, *weights: Tensor) -> Tensor:
        products = {name: StandIn(weight) for name, weight in zip(gate[:3], weights, strict=True)}
        return type(module).forward(shadow(module, _modules=module._modules | products), x)

    def formula(x: Tensor, first: Tensor, second: Tensor, third: Tensor) -> Tensor:
        return gated(x @ first, x @ second, gate.activation, impl="eager") @ third

    shapes = (
        (TOKENS, HIDDEN),
        (HIDDEN, INTERMEDIATE),
        (HIDDEN, INTERMEDIATE),
        (INTERMEDIATE, HIDDEN),
    )
    return computes_the_same(
        part, formula, *(numbers(*shape, seed=seed) for seed, shape in enumerate(shapes))
    )


# --- finding rotary positions ---------------------------------------------------------------------


@cache
def with_fused_rotation(kind: Any) -> Callable[..., Any] | None:
    """The forward of an attention with `rotated` in place of the family's function; None if it
    names none that turns queries and keys so.
    """
    forward: Any = kind.forward
    while hasattr(forward, "__wrapped__"):
        if forward.__globals__["__name__"] != "transformers.utils.deprecation":
            # It renames keywords.
            return None
        forward = forward.__wrapped__
    for name in forward.__code__.co_names if inspect.isfunction(forward) else ():
        function = forward.__globals__.get(name)
        for interleaved in (False, True):
            if inspect.isfunction(function) and turns(function, interleaved=interleaved):
                fused = {name: partial(rotated, family_function=function, interleaved=interleaved)}
                names = forward.__globals__ | fused
                copied = FunctionType(
                    forward.__code__,
                    names,
                    forward.__name__,
                    forward.__defaults__,
                    forward.__closure__,
                )
                copied.__kwdefaults__ = forward.__kwdefaults__
                return copied
    return None


def turns(function: Callable[..., Any], *, interleaved: bool) -> bool:
    """Whether a function of queries, keys and angles is `rotate`."""
    if list(inspect.signature(function).parameters)[:4] != ANGLES:
        return False
    cos, sin = numbers(1, TOKENS, HEAD_SIZE, seed=2), numbers(1, TOKENS, HEAD_SIZE, seed=3)

    def part(query: Tensor, key: Tensor) -> tuple[Tensor, ...]:
        turned = function(query.transpose(0, 1)[None], key.transpose(0, 1)[None], cos, sin)
        return tuple(x[0].transpose(0, 1) for x in turned)

    def formula(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        return rotate(query, key, cos[0], sin[0], interleaved=interleaved, impl="eager")

    return computes_the_same(
        part, formula, numbers(TOKENS, HEADS, HEAD_SIZE), numbers(TOKENS, 1, HEAD_SIZE, seed=1)
    )


# --- finding how a layer is wired -----------------------------------------------------------------


def wiring_of(layer: nn.Module, norms: Mapping[nn.Module, Norm]) -> Wiring | None:
    """How a layer connects its parts, if in a way that `wired` knows."""
    children = {name: child for name, child in layer.named_children() if not is_idle(child)}
    inside = {name: norms[child] for name, child in children.items() if child in norms}
    parts = [name for name in children if name not in inside]
    if len(inside) not in (2, 4) or len(parts) != 2 or layer._parameters or layer._buffers:
        return None
    _, _, *others = inspect.signature(type(layer).forward).parameters.values()
    keywords = tuple(other.name for other in others if other.kind is not other.VAR_KEYWORD)
    for attention, feed_forward in permutations(parts):
        wiring = Wiring(
            attention, feed_forward, tuple(inside), tuple(inside.values()), keywords, frozenset()
        )
        unused = unused_keywords(layer, wiring)
        if unused is None:
            continue
        wiring = wiring._replace(unused=unused)
        if connects(layer, wiring):
            return wiring
    return None


def unused_keywords(layer: nn.Module, wiring: Wiring) -> frozenset[str] | None:
    """The keywords that a layer's attention does not get; None if the parts have other places."""
    noted: list[dict[str, Any]] = []
    try:
        run_layer(layer, wiring, type(layer).forward, noted, *layer_inputs(wiring))
    except Exception:  # from anywhere in a family's layer
        return None
    return frozenset(wiring.keywords) - frozenset(noted[0])


def connects(layer: nn.Module, wiring: Wiring) -> bool:
    """Whether `wired` is the layer's forward, and gives its attention the same keywords."""
    noted: list[dict[str, Any]] = []
    theirs, ours = (
        partial(run_layer, layer, wiring, forward, noted)
        for forward in (type(layer).forward, wired)
    )
    return computes_the_same(theirs, ours, *layer_inputs(wiring)) and noted[0] == noted[1]


def layer_inputs(wiring: Wiring) -> list[Tensor]:
    """Hidden states; weights of the stand-ins; weights of the norms."""
    shapes = [
        (1, TOKENS, HIDDEN),
        (HIDDEN, HIDDEN),
        (HIDDEN, HIDDEN),
        *len(wiring.norms) * [(HIDDEN,)],
    ]
    return [numbers(*shape, seed=seed) for seed, shape in enumerate(shapes)]


def run_layer(
    layer: nn.Module,
    wiring: Wiring,
    forward: Callable[..., Any],
    noted: list[dict[str, Any]],
    x: Tensor,
    *weights: Tensor,
) -> Any:
    """A forward of a layer with stand-ins for its parts. noted: gets the keywords of the attention."""
    first, second, *scales = weights
    small: dict[str, Any] = {
        wiring.attention: StandIn(first, noted),
        wiring.feed_forward: StandIn(second),
    }
    for name, norm, scale in zip(wiring.norms, wiring.kinds, scales, strict=True):
        small[name] = shadow(getattr(layer, name), _parameters={norm.weight: scale})
    passed = {name: f"the layer's {name}" for name in (*wiring.keywords, "fastp3o_segments")}
    return forward(
        shadow(layer, _modules=layer._modules | small, fastp3o_wiring=wiring), x, **passed
    )


def is_idle(module: nn.Module) -> bool:
    """Whether a module gives what it gets."""
    return isinstance(module, nn.Identity) or (isinstance(module, nn.Dropout) and module.p == 0)


# ---- trials


# --- comparing a part with its formula ------------------------------------------------------------


class StandIn(nn.Module):
    """A product in place of a larger part; that of an attention notes its keywords, and gives no
    weights back.
    """

    def __init__(self, weight: Tensor, noted: list[dict[str, Any]] | None = None):
        super().__init__()
        self.product, self.noted = weight, noted

    def forward(self, hidden_states: Tensor, **keywords: Any) -> Any:
        product = hidden_states @ self.product
        if self.noted is None:
            return product
        self.noted.append(keywords)
        return product, None


def shadow(module: nn.Module, **changes: Any) -> Any:
    """A module of the same class and settings, with other parts."""
    other = object.__new__(type(module))
    vars(other).update(vars(module) | changes)
    return other


def numbers(*shape: int, seed: int = 0) -> Tensor:
    """On the CPU; leaves torch's global generator alone."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), device="cpu")


def computes_the_same(
    part: Callable[..., Any], formula: Callable[..., Any], *inputs: Tensor
) -> bool:
    """Whether both functions of these tensors give the same values and gradients, within rounding."""
    try:
        results = values_and_gradients(part, inputs)
        expected = values_and_gradients(formula, inputs)
    except Exception:  # from anywhere in a family's code: then it is another function
        return False
    return len(results) == len(expected) and all(
        a.shape == b.shape and (a - b).abs().max() <= TOLERANCE * b.abs().max()
        for a, b in zip(results, expected, strict=True)
    )


@torch.inference_mode(False)
@torch.enable_grad()
def values_and_gradients(function: Callable[..., Any], inputs: Sequence[Tensor]) -> list[Tensor]:
    leaves = [tensor.clone().requires_grad_() for tensor in inputs]
    result = function(*leaves)
    outputs = result if isinstance(result, tuple) else (result,)
    weights = [numbers(*output.shape, seed=9) for output in outputs]
    return [
        *(output.detach() for output in outputs),
        *torch.autograd.grad(outputs, leaves, weights),
    ]
