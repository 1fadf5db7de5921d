"""Triton's interpreter, faster, and rounding as a GPU does.

For a launch, and for each call of a function from a kernel, it replaces hundreds of functions of
triton.language, and puts them back after the launch: more than half of a small launch's time. Here
they are replaced once and stay. Types of blocks are checked and printed for each result of each
operation; here once for each type.
"""

from collections.abc import Callable
from functools import cache
from types import SimpleNamespace

import numpy
import torch
from triton import language
from triton.runtime import interpreter


def quicken() -> None:
    """For the rest of the process. Nothing can be compiled in it."""
    for name, faster in {"_patch_lang": replace_once, "_get_np_dtype": look_up_once}.items():
        if hasattr(interpreter, name):  # another version of Triton may have none
            setattr(interpreter, name, faster(getattr(interpreter, name)))
    language.core.block_type.__init__ = made_once(language.core.block_type.__init__)


def replace_once(replace: Callable) -> Callable:
    replaced: set[int] = set()
    nothing_to_put_back = SimpleNamespace(restore=lambda: None)

    def for_function(function: Callable) -> SimpleNamespace:
        modules = {id(value) for value in function.__globals__.values()} & {
            id(language),
            id(language.core),
        }
        if not modules <= replaced:
            replace(function)
            replaced.update(modules)
        return nothing_to_put_back

    return cache(for_function)


def look_up_once(numpy_dtype: Callable) -> Callable:
    known: dict[str, numpy.dtype] = {}

    def for_dtype(dtype: language.dtype) -> numpy.dtype:
        name = dtype.scalar.name
        if name not in known:
            known[name] = numpy_dtype(dtype.scalar)
        return known[name]

    return for_dtype


def made_once(initialize: Callable) -> Callable:
    """Equal types of blocks have the same attributes, which nothing changes."""
    known: dict[tuple, dict] = {}

    def initialize_once(self: language.block_type, element_ty: language.dtype, shape: list) -> None:
        kind = element_ty.name, getattr(element_ty, "address_space", None), *shape
        if kind not in known:
            initialize(self, element_ty, shape)
            known[kind] = dict(vars(self))
        vars(self).update(known[kind])

    return initialize_once


def mask_by_truths() -> None:
    """For the rest of the process, comparisons give truths: the interpreter says that they have the
    type of what was compared. Spread over a block, one of single values becomes whole numbers,
    which Triton 3.9 takes for no mask.
    """
    compute = interpreter.InterpreterBuilder.binary_op

    def typed(self, left, right, operation):
        result = compute(self, left, right, operation)
        if result.data.dtype == numpy.bool_:
            result.dtype = language.int1
        return result

    interpreter.InterpreterBuilder.binary_op = typed


def round_to_nearest() -> None:
    """For the rest of the process, fp32 becomes bf16 by rounding: cutting digits, as before, makes
    twice the error.
    """
    convert = interpreter._convert_float

    def rounded(
        values: numpy.ndarray, source: language.dtype, target: language.dtype, mode: object
    ) -> numpy.ndarray:
        if (source, target) != (language.float32, language.bfloat16):
            return convert(values, source, target, mode)
        return torch.from_numpy(numpy.array(values)).bfloat16().view(torch.uint16).numpy()

    interpreter._convert_float = rounded
