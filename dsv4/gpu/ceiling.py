"""Bench: launches ceiling.cu: reads a tensor once and adds up its words."""

import ctypes

import torch
from torch import Tensor

from dsv4.gpu.build import call

FLIGHTS = (4, 8)  # loads of 16 bytes that a thread has under way
BLOCKS_PER_SM = 4  # of 512 threads: as many as an SM holds


def read(data: Tensor, total: Tensor, flight: int) -> None:
    """data: whole 16 bytes, on the GPU or pinned; total [1] int32 grows by the sum of its 32-bit words."""
    num_bytes = data.numel() * data.element_size()
    assert data.is_contiguous() and num_bytes % 16 == 0 and flight in FLIGHTS, (num_bytes, flight)
    assert total.dtype == torch.int32 and total.numel() == 1
    blocks = BLOCKS_PER_SM * torch.cuda.get_device_properties(total.device).multi_processor_count
    arguments = (data, ctypes.c_int64(num_bytes // 16), total)
    call(
        *("gpu/ceiling", f"read_kernel<{flight}>", total.device, *arguments),
        blocks=blocks,
        threads=512,
        overlap=False,
    )
