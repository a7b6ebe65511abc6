"""Decode step and prompts: loads cubins and launches their kernels through the driver. Knows no source."""

import ctypes
import threading
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor

from dsv4.errors import DeviceError

# CUfunction_attribute, CUlaunchAttributeID
_MAX_DYNAMIC_SHARED, _CARVEOUT = 8, 9
_CLUSTER, _PROGRAMMATIC_SERIALIZATION = 4, 6
_FREE_SHARED = 48 << 10  # dynamic shared memory that needs no asking for


class _Attribute(ctypes.Structure):
    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_uint * 16))


class _Config(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_uint) for name in ("blocks", "grid_y", "grid_z", "threads", "block_y", "block_z")),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("num_attributes", ctypes.c_uint),
    )


@cache
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")


def _check(code: int, what: str) -> None:
    if code:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(code, ctypes.byref(text))
        raise DeviceError(f"{what}: {(text.value or b'unknown error').decode()} (CUDA error {code})")


@dataclass
class Kernel:
    name: str
    function: ctypes.c_void_p
    shared: int = _FREE_SHARED  # dynamic shared memory it may have
    configs: dict[tuple[int, bool], _Config] = field(default_factory=dict)  # by cluster and overlap
    _lock: threading.Lock = field(default_factory=threading.Lock)  # of what a launch writes here

    def launch(
        self,
        device: torch.device,
        arguments: tuple[Any, ...],
        blocks: int,
        threads: int,
        shared: int,
        cluster: int,
        overlap: bool,
    ) -> None:
        """As build.call says."""
        values = [_value(argument) for argument in arguments]
        pointers = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
        with self._lock:
            if shared > self.shared:
                _check(
                    _driver().cuFuncSetAttribute(self.function, _MAX_DYNAMIC_SHARED, shared),
                    f"the kernel {self.name} needs {shared} bytes of shared memory",
                )
                self.shared = shared
            config = self.configs.get((cluster, overlap))
            if config is None:
                config = self.configs[cluster, overlap] = _config(cluster, overlap)
                if overlap:
                    assert self.function.value is not None
                    keep_shared_memory(self.function.value)
            config.blocks, config.threads, config.shared = blocks, threads, shared
            config.stream = torch.cuda.current_stream(device).cuda_stream
            code = _driver().cuLaunchKernelEx(ctypes.byref(config), self.function, pointers, None)
        if code:
            _check(code, f"the kernel {self.name} could not be launched")


def _value(argument: Tensor | float | ctypes.Structure | None) -> Any:
    if type(argument) is int:
        return ctypes.c_int(argument)
    if type(argument) is float:
        return ctypes.c_float(argument)
    if argument is None:
        return ctypes.c_void_p(None)
    return ctypes.c_void_p(argument.data_ptr()) if isinstance(argument, Tensor) else argument


def _config(cluster: int, overlap: bool) -> _Config:
    attributes = []
    if overlap:
        attributes.append(_Attribute(_PROGRAMMATIC_SERIALIZATION, 0, (1,)))
    if cluster > 1:
        attributes.append(_Attribute(_CLUSTER, 0, (cluster, 1, 1)))
    held = (_Attribute * len(attributes))(*attributes)
    return _Config(1, 1, 1, 1, 1, 1, 0, None, held, len(attributes))


def load(cubin: bytes, symbols: list[str], device: torch.device) -> dict[str, Kernel]:
    """The kernels of these names, on the device."""
    module, out = ctypes.c_void_p(), {}
    with torch.cuda.device(device):
        _enter_context()
        _check(_driver().cuModuleLoadData(ctypes.byref(module), cubin), f"the driver refused {symbols[0]}")
        for symbol in symbols:
            function = ctypes.c_void_p()
            code = _driver().cuModuleGetFunction(ctypes.byref(function), module, symbol.encode())
            _check(code, f"the driver found no kernel {symbol}")
            out[symbol] = Kernel(symbol, function)
    return out


def _enter_context() -> None:
    """Make the current device's context that of this thread, which may not have used the device yet."""
    context, cuda = ctypes.c_void_p(), _driver()
    _check(cuda.cuCtxGetCurrent(ctypes.byref(context)), "the driver does not answer")
    if context.value is None:
        index = torch.cuda.current_device()
        _check(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), index), f"device {index} has no context")
        _check(cuda.cuCtxSetCurrent(context), f"device {index} cannot be used")


@cache
def keep_shared_memory(function: int) -> None:
    """Let a kernel leave each multiprocessor's memory divided as the products of a step want it.

    Otherwise a small kernel's blocks turn shared memory into cache, and while one of them stays, no block of
    the product after it fits, however early that is launched.
    """
    code = _driver().cuFuncSetAttribute(ctypes.c_void_p(function), _CARVEOUT, 100)  # percent
    _check(code, "the driver refused a kernel's share of shared memory")


def copy_bytes(to: Tensor, source: int) -> None:
    """Fill a contiguous tensor from an address, of either memory where the tensor is a GPU's."""
    assert to.is_contiguous(), to.stride()
    if to.is_cuda:
        torch.cuda.synchronize(to.device)
        pointers = ctypes.c_void_p(to.data_ptr()), ctypes.c_void_p(source)
        _check(_driver().cuMemcpy(*pointers, ctypes.c_size_t(to.nbytes)), "copying an expert")
    else:
        ctypes.memmove(to.data_ptr(), source, to.nbytes)
