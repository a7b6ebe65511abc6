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
    names = [p.name for p in function.params]
    fixed = {p.name for p in function.params if p.is_constexpr}
    given = dict(zip(names, args, strict=False)) | {k: v for k, v in kwargs.items() if k in names}
    options = {k: v for k, v in kwargs.items() if k in ("num_warps", "num_stages")}
    signature, constants, attributes = {}, {}, {}
    for index, name in enumerate(names):
        value = given[name]
        if name in fixed or value is None:
            signature[name], constants[(index,)] = "constexpr", value
        elif isinstance(value, Tensor):
            signature[name] = triton.runtime.jit.mangle_type(value)
            if value.storage_offset() * value.element_size() % 16 == 0:
                attributes[(index,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = "fp32" if isinstance(value, float) else "i32"
            if isinstance(value, int) and value % 16 == 0:
                attributes[(index,)] = [["tt.divisibility", 16]]
    source = triton.compiler.ASTSource(function, signature, constants, attributes)
    target = triton.backends.compiler.GPUTarget("cuda", 90, 32)
    return triton.compile(source, target=target, options=options)
