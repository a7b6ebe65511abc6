"""Times every GPU op at V4-Flash's sizes on a prompt chunk, by the GPU's clock.

    PYTHONPATH=. python tests/bench/prefill_ops.py --tokens 16,64,256,1024,8192 --contexts 4096,131072,1040000

For each number of tokens and each context before them one table: microseconds of an op (several calls in a
graph, where it can be captured), uses in a forward pass of 43 layers, milliseconds of a pass, and the floor:
the larger of what must be read and written at 4.4 TB/s and arithmetic at 780 TFLOP/s. The last line adds up.
`--products` times the products too (once for each number of tokens, with `--experts` 192), `--variants` other
tiles, which count for nothing.
"""

import argparse
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
    def __init__(self, tokens: int, title: str) -> None:
        self.tokens, self.total, self.floor = tokens, 0.0, 0.0
        print(f"\n{title}")
        print(f"{'op':44} {'us':>9} {'uses':>5} {'ms/pass':>9} {'floor':>9} {'TFLOP/s':>8} {'GB/s':>7}")

    def row(self, name: str, uses: int, flop: float, num_bytes: float, call: Callable[..., Any], *args: Any,
            **more: Any) -> None:  # fmt: skip
        try:
            us = microseconds(lambda: call(*args, **more))
        except Exception as error:  # noqa: BLE001  # the other rows are still worth having
            print(f"{name:44} {type(error).__name__}: {str(error)[:120]!r}", flush=True)
            return
        floor = max(num_bytes / 4.4e6, flop / 780e6)
        self.total += us * uses / 1e3
        self.floor += floor * uses / 1e3
        rates = f"{flop / us / 1e6:8.1f} {num_bytes / us / 1e3:7.0f}"
        print(
            f"{name:44} {us:9.1f} {uses:5d} {us * uses / 1e3:9.2f} {floor * uses / 1e3:9.2f} {rates}",
            flush=True,
        )

    def end(self) -> None:
        print(f"a pass: {self.total:.2f} ms, floor {self.floor:.2f} ms")


def microseconds(call: Callable[[], Any]) -> float:
    """Median of seven replays of eight calls; of single calls by the host's clock where a graph cannot be."""
    for _ in range(2):
        call()
    torch.cuda.synchronize()
    graph: torch.cuda.CUDAGraph | None = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            for _ in range(8):
                call()
    except RuntimeError:
        graph = None
    times = []
    for _ in range(7):
        torch.cuda.synchronize()
        start = time.perf_counter()
        if graph is not None:
            graph.replay()
        else:
            call()
        torch.cuda.synchronize()
        times.append(1e6 * (time.perf_counter() - start) / (8 if graph is not None else 1))
    return sorted(times)[3]


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
    """Tokens after `context` others, in shuffled pages, its entries and index keys in pools of that size."""

    def __init__(self, tokens: int, context: int) -> None:
        self.tokens, self.length = tokens, context + tokens
        self.positions = torch.arange(context, self.length, device="cuda")
        self.slots, self.first = torch.zeros_like(self.positions), torch.full_like(self.positions, context)
        angle = rand(tokens, ROPE // 2, dtype=F32)
        self.turns = (angle.cos(), angle.sin())
        self.pages = -(-self.length // 256)
        self.page_table = torch.randperm(self.pages, device="cuda").view(1, -1).int()

    def closing(self, ratio: int) -> Tensor:
        return ((self.positions + 1) % ratio == 0).nonzero().squeeze(1)


def entries(table: Table, p: Prompt) -> None:
    t = table.tokens
    q, kv, ones = rand(t, HEADS, WIDTH), rand(t, WIDTH), torch.ones(WIDTH, device="cuda")
    table.row("qkv queries", LAYERS, 0, 4.0 * q.numel(), qkv.queries, q, *p.turns, 1e-6)
    table.row("qkv entries", LAYERS, 0, 4.0 * kv.numel(), qkv.entries, kv, ones, *p.turns, 1e-6)
    table.row("qkv store", LAYERS, 0, 3.0 * kv.numel(), qkv.store, kv, ROPE, Format.KV8, True)
    fresh = qkv.store(kv, ROPE, Format.KV8, True)
    ring = empty_rows(Format.KV8, WINDOW + 8, WIDTH, ROPE, ACT, "cuda")
    kept = p.positions[-(WINDOW + 8) :] % (WINDOW + 8)
    last = torch.arange(t, device="cuda")[-(WINDOW + 8) :]
    table.row("qkv put (ring)", LAYERS, 0, 1168.0 * len(kept), qkv.put, ring, kept, fresh, last)
    for ratio, uses, columns in ((4, CSA, 2 * WIDTH), (128, HCA, WIDTH), (4, CSA, 2 * INDEX_DIM)):
        tail = 2 * ratio + 8
        rows = [rand(t, columns, dtype=F32) for _ in range(2)]
        rows += [rand(1, tail, columns, dtype=F32) for _ in range(2)]
        closing = p.closing(ratio)
        where = (closing, p.slots, p.positions, p.first, ratio, ratio == 4)
        name = f"ratio {ratio}, {columns} wide"
        table.row(f"compress pool, {name}", uses, 0, 8.0 * t * columns, compress.pool, *rows, *where)
        last, at = torch.arange(t, device="cuda")[-tail:], p.positions[-tail:] % tail
        moved = (rows[2], rows[3], at, rows[0], rows[1], last)
        table.row(f"compress put, {name}", uses, 0, 16.0 * len(at) * columns, compress.put, *moved)


def selection(table: Table, p: Prompt, variants: bool) -> None:
    t = table.tokens
    pooled, turns = rand(t // 4, INDEX_DIM), [turn[: t // 4] for turn in p.turns]
    ones = torch.ones(INDEX_DIM, device="cuda")
    table.row("index keys", CSA, 0, 0, index.keys, pooled, ones, *turns, 1e-6, True, Format.MXFP4)
    if p.length // 4 <= TOPK:
        return
    q, weights = rand(t, INDEX_HEADS, INDEX_DIM), rand(t, INDEX_HEADS, dtype=F32)
    table.row("index queries", CSA, 0, 4.0 * q.numel(), index.queries, q, *p.turns, True)
    keys = empty_rows(Format.MXFP4, p.pages * 64, INDEX_DIM, 0, ACT, "cuda")
    keys.data.random_(0, 256)
    assert keys.scale is not None
    keys.scale.fill_(127)
    seen = float(((p.positions + 1) // 4).sum())
    flop, moved = 2.0 * INDEX_HEADS * INDEX_DIM * seen, 68.0 * (p.length // 4) + 8.0 * seen
    where = (keys, p.page_table, p.slots, p.positions)
    table.row("index select", CSA, flop, moved, index.select, q, weights, *where, 4, 64, TOPK, p.length)
    rows = min(t, max(32, index.SCORE_BYTES // p.length))
    scores = torch.empty(rows, p.length // 4, device="cuda")
    part = (q[:rows], weights[:rows], keys, p.page_table, p.slots[:rows], p.positions[:rows], scores, 4, 64)
    kept = index.BLOCK[ACT]
    for block in (kept, *((32, 64, 4, 3), (64, 128, 4, 3), (32, 128, 8, 3), (16, 128, 4, 3))[: 4 * variants]):
        index.BLOCK[ACT] = block
        share = flop * rows / t
        table.row(f"(index scores of {rows} {block})", 0, share, 0, index._scores, *part, TOPK)
    index.BLOCK[ACT] = kept


def attention(table: Table, p: Prompt, variants: bool) -> None:
    t = table.tokens
    q, sinks = rand(t, HEADS, WIDTH), rand(HEADS, dtype=F32)
    fresh = qkv.store(rand(t, WIDTH), ROPE, Format.KV8, True)
    ring = empty_rows(Format.KV8, 8 * (WINDOW + 8), WIDTH, ROPE, ACT, "cuda")
    near = (q, fresh, ring, p.slots, p.positions, p.first, WINDOW, WINDOW + 8)
    window = float((p.positions + 1).clamp(max=WINDOW).sum())

    def row(name: str, uses: int, pool: QuantTensor | None, rows: Tensor | None, ratio: int = 0) -> None:
        keys, read = window, 0.0
        if ratio:
            seen = (p.positions + 1) // ratio
            keys += float((seen if rows is None else seen.clamp(max=TOPK)).sum())
            read = 584.0 * min(float(seen.max()), keys)
        flop, moved = 4.0 * HEADS * WIDTH * keys, 4.0 * q.numel() + read
        more = (p.page_table, ratio, 256 // ratio) if ratio else ()
        table.row(name, uses, flop, moved, attend.attend, *near, pool, rows, sinks, *p.turns, *more)

    row("attend sliding", LAYERS - CSA - HCA, None, None)
    row("attend hca", HCA, qkv.store(rand(2 * p.pages, WIDTH), ROPE, Format.KV8, True), None, 128)
    pool, rows = qkv.store(rand(64 * p.pages, WIDTH), ROPE, Format.KV8, True), None
    if p.length // 4 > TOPK:
        start = (
            torch.rand(t, 1, device="cuda") * ((p.positions + 1) // 4 - TOPK).clamp(min=0).unsqueeze(1)
        ).long()
        entry = start + torch.arange(TOPK, device="cuda")
        rows = p.page_table[0][entry // 64] * 64 + (entry % 64).int()
        rows = torch.where(entry < ((p.positions + 1) // 4).unsqueeze(1), rows, -1).contiguous()
    row("attend csa", CSA, pool, rows, 4)
    kept, attend.DECODED_BYTES = attend.DECODED_BYTES, 0
    row("(attend csa, decoding in the kernel)", 0, pool, rows, 4)
    attend.DECODED_BYTES, kept_block = kept, attend.BLOCK[ACT]
    others = ((64, 64, 8, 2), (64, 64, 8, 3), (64, 32, 8, 3), (64, 32, 8, 7), (64, 16, 8, 7))
    for block in others if variants else ():
        attend.BLOCK[ACT] = block
        row(f"(attend csa {block})", 0, pool, rows, 4)
    attend.BLOCK[ACT] = kept_block


def mixes(table: Table) -> None:
    """Other tiles of the mixes' product."""
    streams, fn = rand(table.tokens, STREAMS, D), 0.01 * rand(STREAMS * D, 24, dtype=F32)
    kept, size = (mhc.TILE[ACT], mhc._PART), 2.0 * streams.numel()
    for part in (256, 512):
        for tile in ((64, 64, 4, 3), (64, 128, 4, 2), (64, 32, 4, 3), (128, 64, 4, 3), (128, 64, 8, 3)):
            mhc.TILE[ACT], mhc._PART = tile, part
            table.row(f"(mhc products {tile} of {part})", 0, 0, size, mhc._partial, streams, fn)
    mhc.TILE[ACT], mhc._PART = kept


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", default="16,64,256,1024,8192")
    parser.add_argument("--contexts", default="4096,131072,1040000")
    parser.add_argument("--experts", type=int, default=192)
    parser.add_argument("--products", action="store_true")
    parser.add_argument("--variants", action="store_true")
    options = parser.parse_args()
    torch.manual_seed(0)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {options.experts} experts")
    for tokens in map(int, options.tokens.split(",")):
        if options.products:
            table = Table(tokens, f"{tokens} tokens, products")
            products(table)
            experts_and_route(table, options.experts)
            table.end()
        for context in map(int, options.contexts.split(",")):
            table, prompt = Table(tokens, f"{tokens} tokens after {context}"), Prompt(tokens, context)
            streams_and_norms(table)
            if options.variants:
                mixes(table)
            entries(table, prompt)
            selection(table, prompt, options.variants)
            attention(table, prompt, options.variants)
            table.end()


if __name__ == "__main__":
    main()
