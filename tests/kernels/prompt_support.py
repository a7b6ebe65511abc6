"""Launches of prompts' kernels on their twins, and rows that show what goes wrong."""

import ctypes
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import Tensor

from dsv4.ops.linear.prefill_packed import Packed
from tests.support.twin import as_one

MULTIPROCESSORS = 3  # so that a launch has few blocks, and a block has several tiles
BF16, F32 = torch.bfloat16, torch.float32


@contextmanager
def on_twins(twin_of: Callable[[str], ctypes.CDLL], module: ModuleType, seed: int = 0) -> Iterator[None]:
    """Inside, this module's launches run on the twins of their sources."""

    def call(source: str, kernel: str, device: object, *given: object, **how: int) -> None:
        of = how["blocks"], how["threads"], how.get("shared", 0), seed
        problem = twin_of(source).launch(kernel.encode(), as_one(given), *of)
        assert problem == b"", f"{kernel}: {problem.decode()}"

    with pytest.MonkeyPatch.context() as patch:
        properties = SimpleNamespace(multi_processor_count=MULTIPROCESSORS)
        patch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        patch.setattr(module, "call", call)
        yield


def on_twin(twin: ctypes.CDLL, module: ModuleType, seed: int = 0) -> AbstractContextManager[None]:
    return on_twins(lambda source: twin, module, seed)


def rand(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def hostile(rows: int, k: int, seed: int = 1) -> Tensor:
    """Rows of every size, and with a block unlike the others; zeros; what is no number."""
    x = rand(rows, k, seed=seed)
    sizes = [1.0, 1e-6, 1e30, 0.0, 1e-39, 2.0**100, 1e-20]
    x *= torch.tensor([sizes[i % len(sizes)] for i in range(rows)]).unsqueeze(1)
    x[::3, : k // 2] *= 2.0**9
    x[1::5, ::2] = 0
    if rows > 12:
        x[7, 3], x[9, k - 1], x[11, k // 2] = torch.inf, -torch.inf, torch.nan
    return x.bfloat16()


def fp8_rows_of(packed: Packed) -> tuple[Tensor, Tensor]:
    """[rows, K] codes, [rows, K / 128] scales of all rows, those that pad them too."""
    raw = packed.data.view(-1, packed.data.shape[1], 2, 2, 2112)  # group, slice, half of it, eight rows
    rows = raw.shape[0] * 16
    codes = raw[..., :2048].reshape(*raw.shape[:4], 16, 8, 16).permute(0, 3, 5, 1, 2, 4, 6).reshape(rows, -1)
    scales = raw[..., 2048:].contiguous().view(torch.float32).view(*raw.shape[:4], 2, 8)
    return codes, scales.permute(0, 3, 5, 1, 2, 4).reshape(rows, -1)
