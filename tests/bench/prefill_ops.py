"""Times every GPU op at V4-Flash's sizes on a prompt chunk.

    PYTHONPATH=. python tests/bench/prefill_ops.py [tokens, 8192] [experts, 192]

One row per op and use: milliseconds (median), uses in a forward pass of 43 layers, TFLOP/s of the products
and GB/s of what must be read and written at least. Rows of no use compare settings. The last line adds up.
"""

import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from dsv4.kernels.common import tiles
from dsv4.kernels.prefill import dense
from dsv4.ops.attend import gpu as attend
from dsv4.ops.compress import gpu as compress
from dsv4.ops.experts import gpu as experts
from dsv4.ops.index import gpu as index
from dsv4.ops.linear import gpu as linear
from dsv4.ops.mhc import gpu as mhc
from dsv4.ops.norm import gpu as norm
from dsv4.ops.qkv import gpu as qkv
from dsv4.ops.route import gpu as route
from dsv4.quant.formats import Format, QuantTensor, empty_rows

D, HEADS, WIDTH, ROPE, RANK, GROUPS, ORANK, INNER, TOPK = 4096, 64, 512, 64, 1024, 8, 1024, 2048, 512
WINDOW, STREAMS, INDEX_HEADS, INDEX_DIM, VOCAB, CHOICES = 128, 4, 64, 128, 129280, 6
LAYERS, CSA, HCA = 43, 21, 20
ACT, F32 = torch.bfloat16, torch.float32


def rand(*shape: int, dtype: torch.dtype = ACT) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=dtype)


def tiled(format: Format, rows: int, cols: int, count: int = 1, halves: int = 1) -> tiles.Tiled:
    """Random codes under plain scales: times do not depend on values that stay finite."""
    out = tiles.empty(format, (rows, cols), count, halves, "cuda")
    out.data.random_(0, 120 if format is Format.FP8 else 256)
    out.scale.fill_(0x38 if format is Format.NVFP4 else 127)
    if format is Format.FP8:
        out.scale.view(F32).fill_(2.0**-6)
    if format is Format.BF16:
        out.data.view(ACT).normal_()
    out.factor.fill_(0.01)
    return out


class Table:
    def __init__(self, tokens: int) -> None:
        self.tokens, self.total = tokens, 0.0
        print(f"{'op':44} {'ms':>9} {'per pass':>9} {'ms/pass':>9} {'TFLOP/s':>9} {'GB/s':>8}")

    def row(self, name: str, uses: int, flop: float, num_bytes: float, call: Callable[..., Any], *args: Any,
            **more: Any) -> None:  # fmt: skip
        try:
            times = []
            for repeat in range(9):
                torch.cuda.synchronize()
                start = time.perf_counter()
                call(*args, **more)
                torch.cuda.synchronize()
                if repeat >= 2:
                    times.append(1e3 * (time.perf_counter() - start))
        except Exception as error:  # noqa: BLE001  # the other rows are still worth having
            print(f"{name:44} {type(error).__name__}: {str(error)[:120]!r}", flush=True)
            return
        ms = sorted(times)[len(times) // 2]
        self.total += ms * uses
        rates = f"{flop / ms / 1e9:9.1f} {num_bytes / ms / 1e6:8.0f}"
        print(f"{name:44} {ms:9.3f} {uses:9d} {ms * uses:9.1f} {rates}", flush=True)


def product(table: Table, name: str, uses: int, rows: int, cols: int, format: Format, **more: Any) -> None:
    x, weight = rand(table.tokens, cols), tiled(format, rows, cols)
    table.row(
        f"linear {name} {format}", uses, 2.0 * len(x) * rows * cols, 0, linear.linear, x, weight, **more
    )


def products(table: Table) -> None:
    t, nv, plain, wide = table.tokens, Format.NVFP4, Format.BF16, {"out_dtype": F32}
    product(table, "wq_a", LAYERS, RANK, D, nv)
    product(table, "wq_b", LAYERS, HEADS * WIDTH, RANK, nv)
    product(table, "wq_b", 0, HEADS * WIDTH, RANK, Format.FP8)
    product(table, "wkv", LAYERS, WIDTH, D, nv)
    product(table, "wo_b", LAYERS, D, GROUPS * ORANK, nv)
    product(table, "compressor of csa", 2 * CSA, 2 * WIDTH, D, plain, **wide)
    product(table, "compressor of hca", 2 * HCA, WIDTH, D, plain, **wide)
    product(table, "compressor of index", 2 * CSA, 2 * INDEX_DIM, D, plain, **wide)
    product(table, "index wq_b", CSA, INDEX_HEADS * INDEX_DIM, RANK, nv)
    product(table, "index weights", CSA, INDEX_HEADS, D, plain)
    size, fp8, x = HEADS * WIDTH * RANK, tiled(Format.FP8, HEADS * WIDTH, RANK), rand(t, RANK)
    table.row("(unpack wq_b fp8)", 0, 0, 3.0 * size, dense.rows, fp8, ACT, 0, HEADS * WIDTH)
    loose = tiles.Tiled(fp8.format, fp8.shape, fp8.data, fp8.scale, fp8.factor, False)
    table.row("linear wq_b fp8 in two parts", 0, 4.0 * t * size, 0, linear.linear, x, loose)
    x, wo_a = rand(t, GROUPS, HEADS * WIDTH // GROUPS), tiled(nv, GROUPS * ORANK, HEADS * WIDTH // GROUPS)
    table.row("grouped wo_a nvfp4", LAYERS, 2.0 * t * ORANK * HEADS * WIDTH, 0, linear.grouped, x, wo_a)
    head = tiled(plain, VOCAB, D)
    table.row("linear head bf16, 1 row", 1, 0, 6.0 * VOCAB * D, linear.linear, rand(1, D), head, **wide)


def experts_and_route(table: Table, count: int) -> None:
    t, nv = table.tokens, Format.NVFP4
    x = rand(t, D)
    bank = SimpleNamespace(w13=tiled(nv, INNER, D, count, 2), w2=tiled(nv, D, INNER, count))
    ids = torch.rand(t, count, device="cuda").argsort(1)[:, :CHOICES].contiguous()
    weights, flop = rand(t, CHOICES, dtype=F32), 6.0 * t * CHOICES * INNER * D
    kept = experts.GROUP
    for group in (4, 8, 16, 32):
        experts.GROUP = group
        routed = (experts.routed, x, ids, weights, bank, 10.0, "a16")
        table.row(f"experts routed, {group} at a time", LAYERS * (group == kept), flop, 0, *routed)
    experts.GROUP = kept
    some = min(16, count)
    table.row("(unpack 16 w13)", 0, 0, some * 2 * INNER * D * 2.5625, dense.bank, bank.w13, ACT, 0, some)
    shared = tuple(tiled(nv, *shape) for shape in ((INNER, D), (INNER, D), (D, INNER)))
    table.row("experts shared", LAYERS, 6.0 * t * INNER * D, 0, experts.ffn, x, shared, 10.0, "a16")
    gate, bias = tiled(Format.BF16, count, D), rand(count, dtype=F32)
    flop = 2.0 * t * count * D
    table.row("route by_score", LAYERS, flop, 2.0 * t * D, route.by_score, x, gate, bias, CHOICES, 1.5)


def streams_and_norms(table: Table) -> None:
    t = table.tokens
    x, ones = rand(t, D), torch.ones(D, device="cuda")
    table.row("norm of 4096", 2 * LAYERS, 0, 4.0 * t * D, norm.rms_norm, x, ones, 1e-6)
    low = rand(t, RANK)
    table.row("norm of 1024", LAYERS, 0, 4.0 * t * RANK, norm.rms_norm, low, ones[:RANK], 1e-6)
    streams, mixes, size = rand(t, STREAMS, D), STREAMS * (STREAMS + 2), 2.0 * t * STREAMS * D
    mix = [rand(*shape, dtype=F32) for shape in ((STREAMS * D, mixes), (mixes,), (mixes,))]
    mix[0] *= 0.01
    table.row("mhc pre", 2 * LAYERS, 0, 2.25 * size, mhc.pre, streams, *mix, 1e-6, 1e-6, 20)
    table.row("(mhc products alone)", 0, 0, size, mhc._partial, streams, mix[0])
    _, gate, comb = mhc.pre(streams, *mix, 1e-6, 1e-6, 20)  # type: ignore[call-arg]
    table.row("mhc post", 2 * LAYERS, 0, 2.25 * size, mhc.post, x, streams, gate, comb)


class Prompt:
    """One sequence from position 0, in shuffled pages, its entries and index keys in pools twice as large."""

    def __init__(self, tokens: int) -> None:
        self.positions = torch.arange(tokens, device="cuda")
        self.slots, self.first = torch.zeros_like(self.positions), torch.zeros_like(self.positions)
        angle = rand(tokens, ROPE // 2, dtype=F32)
        self.turns = (angle.cos(), angle.sin())
        self.pages = -(-tokens // 256)
        self.page_table = torch.randperm(2 * self.pages, device="cuda")[: self.pages].view(1, -1).int()

    def visible(self, ratio: int) -> Tensor:
        return index.visible_rows(self.page_table, self.slots, self.positions, ratio, 256 // ratio)


def entries(table: Table, p: Prompt) -> None:
    t = table.tokens
    q, kv, ones = rand(t, HEADS, WIDTH), rand(t, WIDTH), torch.ones(WIDTH, device="cuda")
    table.row("qkv queries", LAYERS, 0, 4.0 * q.numel(), qkv.queries, q, *p.turns, 1e-6)
    table.row("qkv entries", LAYERS, 0, 4.0 * kv.numel(), qkv.entries, kv, ones, *p.turns, 1e-6)
    table.row("qkv store", LAYERS, 0, 3.0 * kv.numel(), qkv.store, kv, ROPE, Format.KV8, True)
    for ratio, uses, columns in ((4, CSA, 2 * WIDTH), (128, HCA, WIDTH), (4, CSA, 2 * INDEX_DIM)):
        rows = [rand(t, columns, dtype=F32) for _ in range(2)]
        rows += [rand(1, 2 * ratio + 8, columns, dtype=F32) for _ in range(2)]
        closing = ((p.positions + 1) % ratio == 0).nonzero().squeeze(1)
        where = (closing, p.slots, p.positions, p.first, ratio, ratio == 4)
        name = f"compress pool, ratio {ratio}, {columns} wide"
        table.row(name, uses, 0, 8.0 * t * columns, compress.pool, *rows, *where)
        table.row(f"index visible_rows, ratio {ratio}", 1, 0, 4.0 * t * (t // ratio), p.visible, ratio)


def selection(table: Table, p: Prompt) -> None:
    t = table.tokens
    q, weights = rand(t, INDEX_HEADS, INDEX_DIM), rand(t, INDEX_HEADS, dtype=F32)
    table.row("index queries", CSA, 0, 4.0 * q.numel(), index.queries, q, *p.turns, True)
    pooled, turns = rand(t // 4, INDEX_DIM), [turn[: t // 4] for turn in p.turns]
    ones = torch.ones(INDEX_DIM, device="cuda")
    table.row("index keys", CSA, 0, 0, index.keys, pooled, ones, *turns, 1e-6, True, Format.MXFP4)
    keys = empty_rows(Format.MXFP4, 2 * p.pages * 64, INDEX_DIM, 0, ACT, "cuda")
    keys.data.random_(0, 256)
    assert keys.scale is not None
    keys.scale.fill_(127)
    flop = 2.0 * INDEX_HEADS * INDEX_DIM * float(((p.positions + 1) // 4).sum())
    where = (keys, p.page_table, p.slots, p.positions)
    table.row("index select", CSA, flop, 0, index.select, q, weights, *where, 4, 64, TOPK)
    scores = torch.empty(t, t // 4, device="cuda")
    kept = index.BLOCK[ACT]
    for block in (kept, (32, 64, 4, 3), (64, 128, 4, 3), (32, 128, 8, 3), (32, 128, 4, 2)):
        index.BLOCK[ACT] = block
        table.row(
            f"(index scores alone {block})", 0, flop, 0, index._scores, q, weights, *where, scores, 4, 64
        )
    index.BLOCK[ACT] = kept


def attention(table: Table, p: Prompt) -> None:
    t = table.tokens
    q, sinks = rand(t, HEADS, WIDTH), rand(HEADS, dtype=F32)
    fresh = qkv.store(rand(t, WIDTH), ROPE, Format.KV8, True)
    ring = empty_rows(Format.KV8, 8 * (WINDOW + 8), WIDTH, ROPE, ACT, "cuda")
    near = (q, fresh, ring, p.slots, p.positions, p.first, WINDOW, WINDOW + 8)
    window = float((p.positions + 1).clamp(max=WINDOW).sum())

    def row(name: str, uses: int, pool: QuantTensor | None, rows: Tensor | None) -> None:
        keys = window + (0.0 if rows is None else float((rows >= 0).sum()))
        table.row(
            name, uses, 4.0 * HEADS * WIDTH * keys, 0, attend.attend, *near, pool, rows, sinks, *p.turns
        )

    row("attend sliding", LAYERS - CSA - HCA, None, None)
    few = p.visible(128)
    row("attend hca", HCA, qkv.store(rand(4 * p.pages, WIDTH), ROPE, Format.KV8, True), few)
    many, pool = p.visible(4), qkv.store(rand(128 * p.pages, WIDTH), ROPE, Format.KV8, True)
    if many.shape[1] > TOPK:
        spare = ((p.positions + 1) // 4 - TOPK).clamp(min=0).unsqueeze(1)
        start = (torch.rand(t, 1, device="cuda") * spare).long()
        many = many.gather(1, start + torch.arange(TOPK, device="cuda"))
    row("attend csa", CSA, pool, many)
    kept, attend.DECODED_BYTES = attend.DECODED_BYTES, 0
    row("attend csa, decoding in the kernel", 0, pool, many)
    attend.DECODED_BYTES, kept_block = kept, attend.BLOCK[ACT]
    for block in (
        (64, 32, 8, 2),
        (64, 32, 8, 3),
        (64, 64, 8, 1),
        (32, 64, 8, 2),
        (32, 64, 4, 2),
        (32, 32, 4, 3),
    ):
        attend.BLOCK[ACT] = block
        row(f"attend csa, heads keys warps stages {block}", 0, pool, many)
    attend.BLOCK[ACT] = kept_block


def main() -> None:
    sizes = [int(value) for value in sys.argv[1:]]
    tokens, count = (sizes + [8192, 192][len(sizes) :])[:2]
    torch.manual_seed(0)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {tokens} tokens, {count} experts")
    table, prompt = Table(tokens), Prompt(tokens)
    products(table)
    experts_and_route(table, count)
    streams_and_norms(table)
    entries(table, prompt)
    selection(table, prompt)
    attention(table, prompt)
    print(f"a pass: {table.total:.0f} ms of ops, {1e3 * tokens / table.total:.0f} tokens/s")


if __name__ == "__main__":
    main()
