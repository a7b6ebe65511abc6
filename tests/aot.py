"""Compiles, without a GPU, the kernels that launchers would launch for given (meta) tensors."""

import re
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import pytest
from torch import Tensor

from dsv4.kernels.common import architectures
from tests.support.cubin import resources

triton = pytest.importorskip("triton", reason="Triton is not installed")


# Whose PTX a GPU has too: Triton tells GPUs by the tens of their compute capability, and only where something
# is multiplied. Not that of a kernel that reduces by redux.sync, which sm_100a has alone.
SISTERS = {103: 100, 121: 120}
ANY_BLACKWELL = {103: 100, 120: 100, 121: 100}
REDUCES = {"_choose_kernel"}
# These find a maximum of three operands at once on 10.0 and 12.0, of two on 10.3 and 12.1.
FIND_MAXIMUM = {"_prepare_kernel", "_attend_kernel"}


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
def compiling(
    then: Callable[[str, Any], None], capability: int = 90, sister: int | None = None, is_whole: bool = True
) -> Iterator[None]:
    """Inside, a launch compiles the kernel and calls `then` with its name and what came out. `sister`: a GPU
    whose PTX this one has too. Not `is_whole`: from that PTX; else it is compared."""

    def run(self: Any, *args: Any, **kwargs: Any) -> None:
        name = self.fn.__name__
        if is_whole or sister is None or name in REDUCES:
            made = compile_launch(self, args, kwargs, capability)
            if sister is not None and name not in REDUCES | FIND_MAXIMUM:
                like = compile_launch(self, args, kwargs, sister)
                assert code_of(made) == code_of(like), f"{name}: sm_{sister} does not stand for {capability}"
        else:
            made = assemble(compile_launch(self, args, kwargs, sister), sister, capability)
        then(name, made)

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


def code_of(made: Any) -> str:
    """Its PTX without the GPU's name and the places in the source."""
    return re.sub(r"\.target sm_\w+|//.*|\.(file|loc)\s.*", "", made.asm["ptx"])


def assemble(made: Any, of: int, capability: int) -> Any:
    """What was compiled for one GPU, for another: the same PTX, by the assembler that Triton uses."""
    ptx = made.asm["ptx"].replace(f".target sm_{of}a", f".target sm_{capability}a")
    assert f".target sm_{capability}a" in ptx
    ptxas = triton.backends.nvidia.compiler.get_ptxas(capability).path
    with TemporaryDirectory() as folder:
        source, out = Path(folder) / "in.ptx", Path(folder) / "out.cubin"
        source.write_text(ptx)
        command = [ptxas, f"--gpu-name=sm_{capability}a", source, "-o", out]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return SimpleNamespace(asm={"ptx": ptx, "cubin": out.read_bytes()}, metadata=made.metadata)


def check_fits(name: str, made: Any, capability: int) -> None:
    """A block of the compiled kernel against what that GPU gives one."""
    found = resources(made.asm["cubin"], made.metadata.name)
    threads = 32 * made.metadata.num_warps
    assert made.metadata.shared <= architectures.ARCHITECTURES[capability].block_shared, (name, found)
    # Registers are given out in eights.
    assert -(-found.registers // 8) * 8 * threads <= architectures.REGISTERS, (name, found)
