"""Times every GPU op at V4-Flash's sizes on a prompt chunk: python tests/bench/prefill_ops.py [tokens] [experts].

One row per op and use: milliseconds (median), times per forward pass of 43 layers, TFLOP/s of the products and
GB/s of what must be read and written at least. The last lines add up a whole pass.
"""

import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

sys.path[:0] = [str(Path(__file__).parents[2])]
from dsv4.kernels import dense, tiles
from dsv4.ops.attend import gpu as attend
from dsv4.ops.compress import gpu as compress
from dsv4.ops.experts import gpu as experts
from dsv4.ops.index import gpu as index
from dsv4.ops.linear import gpu as linear
from dsv4.ops.mhc import gpu as mhc
from dsv4.ops.norm import gpu as norm
from dsv4.ops.qkv import gpu as qkv
from dsv4.ops.route import gpu as route
from dsv4.quant.formats import Format, empty_rows

D, HEADS, WIDTH, ROPE, RANK, GROUPS, ORANK, INNER, TOPK = 4096, 64, 512, 64, 1024, 8, 1024, 2048, 512
WINDOW, STREAMS, INDEX_HEADS, INDEX_DIM, VOCAB, CHOICES = 128, 4, 64, 128, 129280, 6
LAYERS, CSA, HCA = 43, 21, 20
ACT = torch.bfloat16


def rand(*shape: int, dtype: torch.dtype = ACT) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=dtype)


def tiled(format: Format, rows: int, cols: int, count: int = 1, halves: int = 1) -> tiles.Tiled:
    """Random codes under plain scales: times do not depend on values that stay finite."""
    out = tiles.empty(format, (rows, cols), count, halves, "cuda")
    out.data.random_(0, 120 if format is Format.FP8 else 256)
    out.scale.fill_(0x38 if format is Format.NVFP4 else 127)
    if format is Format.FP8:
        out.scale.view(torch.float32).fill_(2.0**-6)
    if format is Format.BF16:
        out.data.view(torch.bfloat16).normal_()
    out.factor.fill_(0.01)
    return out


def median_ms(call: Callable[[], Any], repeats: int = 7) -> float:
    for _ in range(2):
        call()
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - start))
    return sorted(times)[repeats // 2]


class Table:
    def __init__(self) -> None:
        self.total = 0.0
        print(f"{'op':34} {'ms':>9} {'per pass':>9} {'ms/pass':>9} {'TFLOP/s':>9} {'GB/s':>8}")

    def row(
        self, name: str, uses: int, call: Callable[[], Any], flop: float = 0.0, num_bytes: float = 0.0
    ) -> None:
        try:
            ms = median_ms(call)
        except Exception as error:  # noqa: BLE001  # the other rows are still worth having
            print(f"{name:34} {type(error).__name__}: {str(error).splitlines()[0][:100]}", flush=True)
            return
        self.total += ms * uses
        rates = f"{flop / ms / 1e9:9.1f} {num_bytes / ms / 1e6:8.0f}"
        print(f"{name:34} {ms:9.3f} {uses:9d} {ms * uses:9.1f} {rates}", flush=True)


def main() -> None:
    t = int(sys.argv[1]) if len(sys.argv) > 1 else 8192
    num_experts = int(sys.argv[2]) if len(sys.argv) > 2 else 192
    torch.manual_seed(0)
    print(torch.cuda.get_device_name(), f"torch {torch.__version__}, {t} tokens, {num_experts} experts")
    table = Table()
    x = rand(t, D)

    def product(
        name: str, uses: int, rows: int, cols: int, format: Format, out: torch.dtype | None = None
    ) -> None:
        weight, inputs = tiled(format, rows, cols), rand(t, cols)
        table.row(name, uses, lambda: linear.linear(inputs, weight, out_dtype=out), 2.0 * t * rows * cols)

    product("linear wq_a nvfp4", LAYERS, RANK, D, Format.NVFP4)
    product("linear wq_b nvfp4", LAYERS, HEADS * WIDTH, RANK, Format.NVFP4)
    product("linear wkv nvfp4", LAYERS, WIDTH, D, Format.NVFP4)
    product("linear wo_b nvfp4", LAYERS, D, GROUPS * ORANK, Format.NVFP4)
    product("linear compressor csa bf16, f32 out", 2 * CSA, 2 * WIDTH, D, Format.BF16, torch.float32)
    product("linear compressor hca bf16, f32 out", 2 * HCA, WIDTH, D, Format.BF16, torch.float32)
    product("linear index compressor, f32 out", 2 * CSA, 2 * INDEX_DIM, D, Format.BF16, torch.float32)
    product("linear index wq_b nvfp4", CSA, INDEX_HEADS * INDEX_DIM, RANK, Format.NVFP4)
    product("linear index weights bf16", CSA, INDEX_HEADS, D, Format.BF16)
    product("linear gate bf16, f32 out", 0, num_experts, D, Format.BF16, torch.float32)
    fp8 = tiled(Format.FP8, HEADS * WIDTH, RANK)
    low = rand(t, RANK)
    table.row("linear wq_b fp8", 0, lambda: linear.linear(low, fp8), 2.0 * t * HEADS * WIDTH * RANK)
    loose = tiles.Tiled(fp8.format, fp8.shape, fp8.data, fp8.scale, fp8.factor, False)
    table.row(
        "linear wq_b fp8, two parts", 0, lambda: linear.linear(low, loose), 4.0 * t * HEADS * WIDTH * RANK
    )
    head, last = tiled(Format.BF16, VOCAB, D), rand(1, D)
    table.row("linear head bf16, 1 row", 1, lambda: linear.linear(last, head, out_dtype=torch.float32),
              num_bytes=2.0 * VOCAB * D)  # fmt: skip
    del head
    wo_a, o = (
        tiled(Format.NVFP4, GROUPS * ORANK, HEADS * WIDTH // GROUPS),
        rand(t, GROUPS, HEADS * WIDTH // GROUPS),
    )
    table.row("grouped wo_a nvfp4", LAYERS, lambda: linear.grouped(o, wo_a), 2.0 * t * ORANK * HEADS * WIDTH)  # type: ignore[arg-type]
    table.row("(unpack wq_b alone)", 0, lambda: dense.rows(fp8, ACT, 0, HEADS * WIDTH),
              num_bytes=3.0 * HEADS * WIDTH * RANK)  # fmt: skip
    del fp8, loose, wo_a, o

    bank = SimpleNamespace(
        w13=tiled(Format.NVFP4, INNER, D, num_experts, 2), w2=tiled(Format.NVFP4, D, INNER, num_experts)
    )
    ids = torch.rand(t, num_experts, device="cuda").argsort(1)[:, :CHOICES].contiguous()
    weights = rand(t, CHOICES, dtype=torch.float32)
    flop = 6.0 * t * CHOICES * INNER * D
    for group in (4, 8, 16, 32):
        experts.GROUP = group
        table.row(f"experts routed, {group} at a time", LAYERS if group == 16 else 0,
                  lambda: experts.routed(x, ids, weights, bank, 10.0, "a16"), flop)  # type: ignore[arg-type]  # fmt: skip
    experts.GROUP = 16
    per_expert = 3.0 * INNER * D
    table.row("(unpack 16 experts alone)", 0,
              lambda: (dense.bank(bank.w13, ACT, 0, 16), dense.bank(bank.w2, ACT, 0, 16)),
              num_bytes=16 * per_expert * 2.5625)  # fmt: skip
    del bank
    shared = tuple(tiled(Format.NVFP4, *s) for s in ((INNER, D), (INNER, D), (D, INNER)))
    table.row("experts shared", LAYERS, lambda: experts.ffn(x, shared, 10.0, "a16"), 6.0 * t * INNER * D)  # type: ignore[arg-type]
    gate, bias = tiled(Format.BF16, num_experts, D), rand(num_experts, dtype=torch.float32)
    table.row(
        "route by_score",
        LAYERS,
        lambda: route.by_score(x, gate, bias, CHOICES, 1.5),
        2.0 * t * num_experts * D,
    )  # type: ignore[arg-type]

    table.row(
        "norm 4096", 3 * LAYERS, lambda: norm.rms_norm(x, bias.new_ones(D), 1e-6), num_bytes=4.0 * t * D
    )
    streams = rand(t, STREAMS, D)
    mixes = 2 * STREAMS + STREAMS**2
    fn, base, scale = (rand(*s, dtype=torch.float32) for s in ((STREAMS * D, mixes), (mixes,), (mixes,)))
    size = 2.0 * t * STREAMS * D
    table.row(
        "mhc pre", 2 * LAYERS, lambda: mhc.pre(streams, fn, base, scale, 1e-6, 1e-6, 20), num_bytes=2 * size
    )
    _, mix, comb = mhc.pre(streams, fn, base, scale, 1e-6, 1e-6, 20)
    table.row("mhc post", 2 * LAYERS, lambda: mhc.post(x, streams, mix, comb), num_bytes=2.25 * size)
    del streams

    positions = torch.arange(t, device="cuda")
    slots, first = torch.zeros_like(positions), torch.zeros_like(positions)
    angle = rand(t, ROPE // 2, dtype=torch.float32)
    cos, sin = angle.cos(), angle.sin()
    q, kv = rand(t, HEADS, WIDTH), rand(t, WIDTH)
    size = 2.0 * t * HEADS * WIDTH
    table.row("qkv queries", LAYERS, lambda: qkv.queries(q, cos, sin, 1e-6), num_bytes=2 * size)
    table.row("qkv entries + store", LAYERS,
              lambda: qkv.store(qkv.entries(kv, bias.new_ones(WIDTH), cos, sin, 1e-6), ROPE, Format.KV8, True))  # fmt: skip
    fresh = qkv.store(kv, ROPE, Format.KV8, True)
    ring = empty_rows(Format.KV8, 8 * (WINDOW + 8), WIDTH, ROPE, ACT, "cuda")
    pages = -(-t // 256)
    page_table = torch.randperm(4 * pages, device="cuda")[: 2 * pages].view(2, pages).int()
    for ratio, uses in ((4, CSA), (128, HCA)):
        columns = WIDTH * (2 if ratio == 4 else 1)
        values, scores = rand(t, columns, dtype=torch.float32), rand(t, columns, dtype=torch.float32)
        tails = (rand(2, ratio * 2 + 8, columns, dtype=torch.float32) for _ in range(2))
        tail_values, tail_scores = tails
        closing = ((positions + 1) % ratio == 0).nonzero().squeeze(1)
        table.row(f"compress pool, ratio {ratio}", uses, lambda: compress.pool(
            values, scores, tail_values, tail_scores, closing, slots, positions, first, ratio, ratio == 4
        ), num_bytes=8.0 * t * columns)  # fmt: skip
        table.row(f"index visible_rows, ratio {ratio}", 1,
                  lambda: index.visible_rows(page_table, slots, positions, ratio, 256 // ratio))  # fmt: skip
    iq = rand(t, INDEX_HEADS, INDEX_DIM)
    table.row("index queries", CSA, lambda: index.queries(iq, cos, sin, True), num_bytes=4.0 * iq.numel())
    pooled, quarter = rand(t // 4, INDEX_DIM), (cos[: t // 4], sin[: t // 4])
    table.row("index keys", CSA,
              lambda: index.keys(pooled, bias.new_ones(INDEX_DIM), *quarter, 1e-6, True, Format.MXFP4))  # fmt: skip
    keys = empty_rows(Format.MXFP4, 4 * pages * 64, INDEX_DIM, 0, ACT, "cuda")
    keys.data.random_(0, 256)
    assert keys.scale is not None
    keys.scale.fill_(127)
    head_weights = rand(t, INDEX_HEADS, dtype=torch.float32)
    table.row("index select", CSA,
              lambda: index.select(iq, head_weights, keys, page_table, slots, positions, 4, 64, TOPK),
              2.0 * INDEX_HEADS * INDEX_DIM * float(((positions + 1) // 4).sum()))  # fmt: skip
    score = torch.empty(t, t // 4, device="cuda")
    table.row("(index scores alone)", 0,
              lambda: index._scores(iq, head_weights, keys, page_table, slots, positions, score, 4, 64),
              2.0 * INDEX_HEADS * INDEX_DIM * float(((positions + 1) // 4).sum()))  # fmt: skip
    del score, iq

    sinks = rand(HEADS, dtype=torch.float32)
    for name, ratio, uses in (("sliding", 0, LAYERS - CSA - HCA), ("csa", 4, CSA), ("hca", 128, HCA)):
        pool = rows = None
        met = (positions + 1).clamp(max=WINDOW).sum()
        if ratio:
            pool = qkv.store(rand(4 * pages * (256 // ratio), WIDTH), ROPE, Format.KV8, True)
            rows = index.visible_rows(page_table, slots, positions, ratio, 256 // ratio)
            if rows.shape[1] > TOPK:
                start = torch.rand(t, 1, device="cuda") * ((positions + 1) // 4 - TOPK).clamp(
                    min=0
                ).unsqueeze(1)
                rows = rows.gather(1, start.long() + torch.arange(TOPK, device="cuda"))
            met = met + (rows >= 0).sum()
        flop = 4.0 * HEADS * WIDTH * float(met)

        def run(pool: Any = pool, rows: Any = rows) -> Tensor:
            where = (slots, positions, first, WINDOW, WINDOW + 8)
            return attend.attend(q, fresh, ring, *where, pool, rows, sinks, cos, sin)

        table.row(f"attend {name}", uses, run, flop)
        if ratio == 4:
            attend.DECODED_BYTES, kept = 0, attend.DECODED_BYTES
            table.row("attend csa, decoding in the kernel", 0, run, flop)
            attend.DECODED_BYTES = kept
            for block in ((64, 32, 8, 2), (64, 32, 8, 3), (64, 64, 8, 1), (32, 64, 8, 2), (32, 64, 4, 2)):
                kept_block, attend.BLOCK[ACT] = attend.BLOCK[ACT], block
                table.row(f"attend csa, heads keys warps stages {block}", 0, run, flop)
                attend.BLOCK[ACT] = kept_block
    print(
        f"a pass: {table.total:.0f} ms, {1e3 * t / table.total:.0f} tokens/s, without what torch adds between ops"
    )


if __name__ == "__main__":
    main()
