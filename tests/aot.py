"""Compiles, without a GPU, the kernels that launchers would launch for given (meta) tensors."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from torch import Tensor

from dsv4.gpu import architectures
from tests.support.cubin import REGISTERS, resources

triton = pytest.importorskip("triton", reason="Triton is not installed")


@contextmanager
def launching(note: Callable[..., None], capability: int) -> Iterator[None]:
    """Inside, a launch calls `note` with the kernel and the launch's arguments instead; tiles are chosen for
    a GPU of that compute capability."""
    kind = triton.runtime.jit.JITFunction
    before = kind.run, architectures.capability
    kind.run, architectures.capability = note, lambda device: capability
    try:
        yield
    finally:
        kind.run, architectures.capability = before


@contextmanager
def compiling(then: Callable[[str, Any], None], capability: int = 90) -> Iterator[None]:
    """Inside, a launch compiles the kernel and calls `then` with its name and what came out."""

    def run(self: Any, *args: Any, **kwargs: Any) -> None:
        then(self.fn.__name__, compile_launch(self, args, kwargs, capability))

    with launching(run, capability):
        yield


def compile_launch(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], capability: int = 90) -> Any:
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
    target = triton.backends.compiler.GPUTarget("cuda", capability, 32)
    return triton.compile(source, target=target, options=options)


def check_fits(name: str, made: Any, capability: int) -> None:
    """A block of the compiled kernel against what that GPU gives one."""
    found = resources(made.asm["cubin"], made.metadata.name)
    threads = 32 * made.metadata.num_warps
    assert made.metadata.shared <= architectures.ARCHITECTURES[capability].block_shared, (name, found)
    assert -(-found.registers // 8) * 8 * threads <= REGISTERS, (name, found)
