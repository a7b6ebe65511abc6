"""Every Triton kernel of the GPU backends compiles where there is no GPU, with the tensor cores' and
asynchronous instructions that the large ones live from, and fits on each GPU that it is built for."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from gpu_support import IS_INTERPRETED
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed")

from dsv4.config import ModelConfig, preset
from dsv4.gpu.architectures import ARCHITECTURES
from dsv4.ops.attention import prefill as attention_prefill
from dsv4.ops.experts import prefill_gemm as experts
from dsv4.ops.index import prefill as index_prefill
from dsv4.ops.linear import prefill_gemm as gemm
from dsv4.ops.mhc import prefill as mhc_prefill
from dsv4.ops.route import prefill as route_prefill
from dsv4.ops.rows import prefill as rows
from dsv4.quant.formats import Format, QuantTensor, empty_rows
from tests.aot import check_fits, compiling

pytestmark = pytest.mark.skipif(IS_INTERPRETED, reason="compiles; nothing to interpret")
TENSOR_CORES = {"_gemm_kernel", "_up_kernel", "_down_kernel", "_mixes_kernel", "listed", "by page"}
TENSOR_CORES |= {"_attend_kernel", "_scores_kernel"}


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def store(format: Format, count: int, width: int, rope: int, dtype: torch.dtype) -> QuantTensor:
    return empty_rows(format, count, width, rope, dtype, "meta")


class Sizes:
    """Arguments for kernels: BF16 at the model's sizes, at which float32 would compile for long."""

    def __init__(self, c: ModelConfig, dtype: torch.dtype) -> None:
        self.tokens, self.dtype, self.rope = 300, dtype, c.rope_dim
        is_small = dtype == torch.float32
        self.heads, self.width = (16, 128) if is_small else (c.num_heads, c.head_dim)
        self.longs = meta(self.tokens, dtype=torch.long)
        self.turns = (meta(self.tokens, self.rope // 2), meta(self.tokens, self.rope // 2))
        self.streams = self.act(self.tokens, 4, c.hidden_size)
        self.ring, self.fresh, self.pool = (
            store(Format.KV8, count, self.width, self.rope, dtype) for count in (8 * 136, self.tokens, 4096)
        )

    def act(self, *shape: int) -> Tensor:
        return meta(*shape, dtype=self.dtype)


def ints(*shape: int) -> Tensor:
    return meta(*shape, dtype=torch.int32)


def launch_products(c: ModelConfig, s: Sizes, out: dict[str, Any]) -> None:
    """What multiplies, and what it reads: tiles and instructions differ between GPUs."""
    t, d, n, inner, longs = s.tokens, c.hidden_size, 4, c.expert_width, s.longs
    gemm.gemm(s.act(t, 1, d), s.act(1, 1, 1024, d), s.act(t, 1, 1024), meta(1))
    tiles = ints(9, 3)
    up = (s.act(t, d), s.act(1, 4, 2 * inner, d), meta(4, 2), s.act(t, inner), ints(t), meta(t), tiles)
    experts.gate_up(*up, 1.0, 0)
    experts.down(s.act(t, inner), s.act(1, 4, d, inner), meta(4, 1), s.act(t, d), ints(t), tiles, 0)
    mhc_prefill.pre(s.streams, meta(n * d, 24), meta(24), meta(24), 1e-6, 1e-6, 20)
    q, sinks = s.act(t, s.heads, s.width), meta(s.heads)
    before_rows = (q, s.fresh, s.ring, longs, longs, longs, 128, 136, s.pool)
    listed = (*before_rows, ints(t, c.index_topk), sinks, *s.turns)
    attention_prefill.attend(*listed)
    out["listed"] = out.pop("_attend_kernel")
    attention_prefill.attend(*before_rows, None, sinks, *s.turns, ints(8, 64), 128, 2)
    out["by page"] = out.pop("_attend_kernel")
    before, attention_prefill.DECODED_BYTES = attention_prefill.DECODED_BYTES, 0
    attention_prefill.attend(*listed)
    attention_prefill.DECODED_BYTES = before
    keys = store(Format.MXFP4, 4096, 128, 0, s.dtype)
    index_prefill._scores(
        s.act(t, 64, 128), meta(t, 64), keys, ints(8, 64), longs, longs, meta(t, 2048), 4, 64
    )


def launch_rest(c: ModelConfig, s: Sizes, out: dict[str, Any]) -> None:
    t, d, longs = s.tokens, c.hidden_size, s.longs
    experts.sum_choices(s.act(50, 6, d), meta(50, d))
    rows.rms_norm(s.act(t, d), meta(d), 1e-6)
    out["norm"] = out.pop("_rows_kernel")
    rows.norm_rotate(s.act(t, s.heads, s.width), None, *s.turns, 1e-6)
    out["rotate"] = out.pop("_rows_kernel")
    rows.rotate_round(s.act(t, 64, 128), *s.turns)
    out["round"] = out.pop("_rows_kernel")
    rows.index_keys(s.act(t, 128), meta(128), *s.turns, 1e-6)
    out["keys"] = out.pop("_rows_kernel")
    rows.kv8(s.act(t, s.width), s.rope)
    mhc_prefill.post(s.act(t, d), s.streams, meta(t, 4), meta(t, 4, 4))
    tails = (meta(8, 16, 1024), meta(8, 16, 1024))
    closing = meta(75, dtype=torch.long)
    attention_prefill.pool(meta(t, 1024), meta(t, 1024), *tails, closing, longs, longs, longs, 4, True)
    route_prefill._choose(meta(t, c.num_experts), meta(c.num_experts), None, 6, 1.5)
    attention_prefill.put_rows(s.ring, longs, s.fresh)
    index_prefill._listed(ints(8, 64), longs, longs, 4, 64, 512)


BF16, F32 = torch.bfloat16, torch.float32
# Every kernel for Hopper at Flash's and Pro's sizes, what multiplies for Blackwell at Flash's. All of it and
# float32 for all GPUs: -m slow.
LAUNCHES = (launch_products, launch_rest)
QUICK = [(name, BF16, 90, launch) for name in ("flash", "pro") for launch in LAUNCHES]
QUICK += [("flash", BF16, capability, launch_products) for capability in (100, 120)]
SIZES = [("flash", BF16), ("pro", BF16), ("flash", F32)]
ALL = [(*of, capability, launch) for of in SIZES for capability in ARCHITECTURES for launch in LAUNCHES]
EACH = [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in ALL if case not in QUICK)]
INSTRUCTION = {90: "wgmma.mma_async", 100: "tcgen05.mma", 120: "mma.sync"}


@pytest.mark.parametrize(("name", "dtype", "capability", "launch"), EACH)
def test_kernels_compile(name: str, dtype: torch.dtype, capability: int, launch: Callable[..., None]) -> None:
    kernels: dict[str, Any] = {}
    with compiling(kernels.__setitem__, capability):
        launch(preset(name), Sizes(preset(name), dtype), kernels)
    assert len(kernels) == 11
    for kind, kernel in kernels.items():
        check_fits(kind, kernel, capability)
        if dtype == torch.bfloat16 and kind in TENSOR_CORES:
            instruction = INSTRUCTION[capability // 10 * 10]
            assert instruction in kernel.asm["ptx"], f"{kind} does without the tensor cores"
            assert "cp.async" in kernel.asm["ptx"], f"{kind} waits for its loads"
