"""Launches through the driver, of which there is none here: what it would be told."""

import ctypes
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dsv4.gpu import driver


def test_threads_launch_one_kernel_each_as_it_asked(impatient: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two engines of one process share its kernels, and a kernel's settings are written at each launch."""
    asked, told = threading.local(), list[tuple[tuple[int, ...], tuple[int, ...]]]()

    def launch(config: Any, function: Any, pointers: Any, none: None) -> int:
        c = config._obj
        told.append(((asked.number,) * 3, (c.blocks, c.shared - (64 << 10), c.stream)))
        return 0

    fake = SimpleNamespace(cuLaunchKernelEx=launch, cuFuncSetAttribute=lambda *_: 0)
    monkeypatch.setattr(driver, "_driver", lambda: fake)
    monkeypatch.setattr(driver, "keep_shared_memory", lambda function: None)
    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=asked.number)
    )
    kernel = driver.Kernel("f", ctypes.c_void_p(1))

    def run(number: int) -> None:
        asked.number = number
        for _ in range(5000):
            kernel.launch(torch.device("cuda"), (1, 2.0), number, 32, (64 << 10) + number, 1, True)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(run, range(1, 5)))
    assert len(told) == 20000 and [pair for pair in told if pair[0] != pair[1]] == []
