"""bf16 and fp8 arithmetic for Triton's interpreter, as the hardware does it. NumPy has no bf16:
without this module the interpreter truncates fp32 to bf16 where a GPU rounds to the nearest (ties
to even), and its matrix product takes the bit patterns for numbers. Its cast to fp8 loses the carry
of a mantissa that rounds up to a power of two."""
# Triton has no types.
# mypy: disable-error-code="import-untyped"

from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpretedFunction, InterpreterBuilder, TensorHandle


def pytest_configure() -> None:
    """As a plugin, this module saves time in which the interpreter computes nothing: at each call
    of a function inside a kernel it replaces the functions of Triton's modules that it has replaced
    already, and for each operation it builds a table of types."""
    types: dict[str, Any] = {}
    replaced: set[str] = set()
    type_of = interpreter._get_np_dtype

    def known_type(kind: Any) -> Any:
        if isinstance(kind.scalar, tl.pointer_type):
            return type_of(kind)
        if kind.scalar.name not in types:
            types[kind.scalar.name] = type_of(kind)
        return types[kind.scalar.name]

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.fn.__module__ not in replaced:
            replaced.add(self.fn.__module__)
            interpreter._patch_lang(self.fn)
        return self.rewrite()(*args, **kwargs)

    interpreter._get_np_dtype = known_type
    InterpretedFunction.__call__ = call


def compute_bf16_as_a_gpu(patch: pytest.MonkeyPatch) -> None:
    cast, dot = InterpreterBuilder.cast_impl, InterpreterBuilder.create_dot

    def rounding_cast(self: Any, source: Any, target: Any) -> Any:
        if (source.dtype.scalar, target.scalar) == (tl.float32, tl.bfloat16):
            return TensorHandle(_rounded(source.data), tl.bfloat16)
        return cast(self, source, target)

    def fp8_cast(self: Any, source: Any, target: Any, _mode: Any) -> Any:
        assert (source.dtype.scalar, target.scalar) == (tl.float32, tl.float8e4nv)
        in_fp8 = torch.from_numpy(source.data).to(torch.float8_e4m3fn)
        return TensorHandle(in_fp8.view(torch.uint8).numpy(), tl.float8e4nv)

    def wide_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return dot(self, _widened(a), _widened(b), *rest)

    patch.setattr(InterpreterBuilder, "cast_impl", rounding_cast)
    patch.setattr(InterpreterBuilder, "create_dot", wide_dot)
    patch.setattr(InterpreterBuilder, "create_fp_to_fp", fp8_cast)


def _rounded(values: Any) -> Any:
    """fp32 rounded to the upper halves of the nearest bf16; a NaN, which could overflow here, stays
    NaN."""
    bits = values.view(np.uint32)
    nearest = (bits + 0x7FFF + (bits >> 16 & 1) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), nearest)


def _widened(handle: Any) -> Any:
    """bf16 as fp32, in which products of bf16 values are exact."""
    if handle.dtype.scalar != tl.bfloat16:
        return handle
    return TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)
