"""Compiles for sm_90, without a GPU, the kernels that launchers would launch for given (meta) tensors."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from torch import Tensor

triton = pytest.importorskip("triton", reason="Triton is not installed")


@contextmanager
def compiling(then: Callable[[str, Any], None]) -> Iterator[None]:
    """Inside, a launch compiles the kernel and calls `then` with its name and what came out."""
    kind = triton.runtime.jit.JITFunction
    before = kind.run
    kind.run = lambda self, *args, **kwargs: then(self.fn.__name__, compile_launch(self, args, kwargs))
    try:
        yield
    finally:
        kind.run = before


def compile_launch(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The kernel for these arguments, specialised as a launch would: on multiples of 16 and on ones."""
    names = [p.name for p in function.params]
    given = dict(zip(names, args, strict=False)) | {k: v for k, v in kwargs.items() if k in names}
    options = {k: v for k, v in kwargs.items() if k.startswith("num_")}
    signature, constants, attributes = {}, {}, {}
    for index, p in enumerate(function.params):
        value = given[p.name]
        is_special = isinstance(value, int) and not p.do_not_specialize
        if p.is_constexpr or value is None or (is_special and value == 1):
            signature[p.name], constants[(index,)] = "constexpr", value
            continue
        if isinstance(value, Tensor):
            signature[p.name] = triton.runtime.jit.mangle_type(value)
            is_even = value.storage_offset() * value.element_size() % 16 == 0
        else:
            signature[p.name] = "fp32" if isinstance(value, float) else "i32"
            is_even = is_special and value % 16 == 0
        if is_even:
            attributes[(index,)] = [["tt.divisibility", 16]]
    source = triton.compiler.ASTSource(function, signature, constants, attributes)
    target = triton.backends.compiler.GPUTarget("cuda", 90, 32)
    return triton.compile(source, target=target, options=options)
