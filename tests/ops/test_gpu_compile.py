"""Every Triton kernel of the GPU backends compiles where there is no GPU, with the tensor cores' and
asynchronous instructions that the large ones live from, and fits on each GPU that it is built for."""

from typing import Any

import pytest
import torch
from gpu_support import IS_INTERPRETED
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed")

from dsv4.config import ModelConfig, preset
from dsv4.kernels.prefill import experts, gemm, rows
from dsv4.ops.attend import gpu as attend_gpu
from dsv4.ops.compress import gpu as compress_gpu
from dsv4.ops.index import gpu as index_gpu
from dsv4.ops.mhc import gpu as mhc_gpu
from dsv4.ops.qkv import gpu as qkv_gpu
from dsv4.ops.route import gpu as route_gpu
from dsv4.quant.formats import Format, QuantTensor, empty_rows
from tests.aot import check_fits, compiling

pytestmark = pytest.mark.skipif(IS_INTERPRETED, reason="compiles; nothing to interpret")
TENSOR_CORES = {"_gemm_kernel", "_up_kernel", "_down_kernel", "_mixes_kernel", "listed", "by page"}
TENSOR_CORES |= {"_attend_kernel", "_scores_kernel"}


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def store(format: Format, count: int, width: int, rope: int, dtype: torch.dtype) -> QuantTensor:
    return empty_rows(format, count, width, rope, dtype, "meta")


def launch_all(c: ModelConfig, dtype: torch.dtype, capability: int) -> dict[str, Any]:
    """Each kernel once, in BF16 at the model's sizes; float32, without tensor cores, compiles long there."""
    out: dict[str, Any] = {}
    t, d, n, heads, width, rope = 300, c.hidden_size, 4, c.num_heads, c.head_dim, c.rope_dim
    inner, topk = c.expert_width, c.index_topk
    if dtype == torch.float32:
        heads, width = 16, 128
    act = lambda *shape: meta(*shape, dtype=dtype)  # noqa: E731
    ints = lambda *shape: meta(*shape, dtype=torch.int32)  # noqa: E731
    longs = meta(t, dtype=torch.long)
    turns = (meta(t, rope // 2), meta(t, rope // 2))
    with compiling(out.__setitem__, capability):
        gemm.gemm(act(t, 1, d), act(1, 1, 1024, d), act(t, 1, 1024), meta(1))
        tiles = ints(9, 3)
        experts.gate_up(
            act(t, d), act(1, 4, 2 * inner, d), meta(4, 2), act(t, inner), ints(t), meta(t), tiles, 1.0, 0
        )
        experts.down(act(t, inner), act(1, 4, d, inner), meta(4, 1), act(t, d), ints(t), tiles, 0)
        experts.sum_choices(act(50, 6, d), meta(50, d))
        rows.norm(act(t, d), meta(d), 1e-6)
        out["norm"] = out.pop("_rows_kernel")
        rows.norm_rotate(act(t, heads, width), None, *turns, 1e-6)
        out["rotate"] = out.pop("_rows_kernel")
        rows.rotate_round(act(t, 64, 128), *turns)
        out["round"] = out.pop("_rows_kernel")
        rows.index_keys(act(t, 128), meta(128), *turns, 1e-6)
        out["keys"] = out.pop("_rows_kernel")
        rows.kv8(act(t, width), rope)
        streams = act(t, n, d)
        mhc_gpu.pre(streams, meta(n * d, 24), meta(24), meta(24), 1e-6, 1e-6, 20)
        mhc_gpu.post(act(t, d), streams, meta(t, n), meta(t, n, n))
        tails = (meta(8, 16, 1024), meta(8, 16, 1024))
        closing = meta(75, dtype=torch.long)
        compress_gpu.pool(meta(t, 1024), meta(t, 1024), *tails, closing, longs, longs, longs, 4, True)
        route_gpu._choose(meta(t, c.num_experts), meta(c.num_experts), None, 6, 1.5)
        ring, fresh, pool = (store(Format.KV8, c, width, rope, dtype) for c in (8 * 136, t, 4096))
        q = act(t, heads, width)
        arguments = (q, fresh, ring, longs, longs, longs, 128, 136, pool, ints(t, topk), meta(heads), *turns)
        attend_gpu.attend(*arguments)
        out["listed"] = out.pop("_attend_kernel")
        attend_gpu.attend(*arguments[:9], None, *arguments[10:], ints(8, 64), 128, 2)
        out["by page"] = out.pop("_attend_kernel")
        before, attend_gpu.DECODED_BYTES = attend_gpu.DECODED_BYTES, 0
        attend_gpu.attend(*arguments)
        attend_gpu.DECODED_BYTES = before
        qkv_gpu.put(ring, longs, fresh)
        keys = store(Format.MXFP4, 4096, 128, 0, dtype)
        index_gpu._scores(act(t, 64, 128), meta(t, 64), keys, ints(8, 64), longs, longs, meta(t, 2048), 4, 64)
        index_gpu._listed(ints(8, 64), longs, longs, 4, 64, 512)
    return out


CASES = [
    ("flash", torch.bfloat16, 90),
    ("pro", torch.bfloat16, 90),
    ("flash", torch.float32, 90),
    ("flash", torch.bfloat16, 100),
    ("flash", torch.bfloat16, 120),
    pytest.param("pro", torch.bfloat16, 100, marks=pytest.mark.slow),
    pytest.param("flash", torch.float32, 100, marks=pytest.mark.slow),
    pytest.param("flash", torch.bfloat16, 103, marks=pytest.mark.slow),
    pytest.param("pro", torch.bfloat16, 120, marks=pytest.mark.slow),
    pytest.param("flash", torch.float32, 120, marks=pytest.mark.slow),
    pytest.param("flash", torch.bfloat16, 121, marks=pytest.mark.slow),
]
INSTRUCTION = {90: "wgmma.mma_async", 100: "tcgen05.mma", 120: "mma.sync"}


@pytest.mark.parametrize(("name", "dtype", "capability"), CASES)
def test_kernels_compile(name: str, dtype: torch.dtype, capability: int) -> None:
    kernels = launch_all(preset(name), dtype, capability)
    assert len(kernels) == 22
    for kind, kernel in kernels.items():
        check_fits(kind, kernel, capability)
        if dtype == torch.bfloat16 and kind in TENSOR_CORES:
            instruction = INSTRUCTION[capability // 10 * 10]
            assert instruction in kernel.asm["ptx"], f"{kind} does without the tensor cores"
            assert "cp.async" in kernel.asm["ptx"], f"{kind} waits for its loads"
