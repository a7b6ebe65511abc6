"""Inputs for every function of every op at a published model's sizes: a few rows to check, many to time."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dsv4.cache.layout import CacheLayout
from dsv4.config import ModelConfig
from dsv4.gpu.tiles import Bank, Tiled, empty, put, tile
from dsv4.lab.bench.decode import fill_rows
from dsv4.lab.bench.subject import DTYPE, cache_layout, needed_bytes
from dsv4.lab.styles import format_of
from dsv4.model.params import Param, declare
from dsv4.ops import IMPLEMENTATIONS
from dsv4.ops.linear import prefill_product as prompts
from dsv4.ops.sample.cpu import pack
from dsv4.quant.formats import FP8_TILE, NV_BLOCK, Format, QuantTensor, empty_rows


@dataclass(frozen=True)
class Made:
    """Arguments of one call and what it cannot do without. `gpu`: in that backend's form, if it has one."""

    arguments: tuple[Any, ...]
    num_bytes: float
    flops: float = 0.0
    gpu: tuple[Any, ...] | None = None

    def of(self, backend: str) -> tuple[Any, ...]:
        return self.gpu if backend == "gpu" and self.gpu is not None else self.arguments


@dataclass(frozen=True)
class Case:
    """`make` gives the inputs for that many rows. `rounds`: the result is rounded to 8 or 4 bits."""

    op: str
    function: str
    name: str
    make: Callable[[int], Made]
    rounds: bool = False


def size_of(value: Any) -> int:
    """Bytes of all tensors in it, without what pads tiles."""
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, QuantTensor):
        return value.num_bytes
    if isinstance(value, Tiled):
        return needed_bytes(value)
    if isinstance(value, Bank):
        return needed_bytes(value.w13) + needed_bytes(value.w2)
    return sum(map(size_of, value)) if isinstance(value, list | tuple) else 0


class Maker:
    """Cases of one model, with `experts` of its experts and queries after `context` tokens."""

    def __init__(
        self, config: ModelConfig, layout: str, experts: int, context: int, device: torch.device
    ) -> None:
        self.c, self.layout, self.context, self.device = config, layout, context, device
        self.experts = experts
        self.generator = torch.Generator(device).manual_seed(3)
        csa = next(i for i, layer in enumerate(config.layers) if layer.kind == "csa")
        prefix = f"layers.{csa}."
        self.params = {p.name.removeprefix(prefix): p for p in declare(config, 0)}
        self.ratio: dict[str, int] = {layer.kind: layer.ratio for layer in config.layers}

    def cases(self, wants: Callable[[str], bool] = lambda op: True) -> Iterator[Case]:
        """One op after the other; a case holds its weights, so let go of it before the next."""
        for op in filter(wants, IMPLEMENTATIONS):
            yield from getattr(self, f"_{op}")()

    def normal(self, *shape: int, dtype: torch.dtype = DTYPE) -> Tensor:
        return torch.randn(shape, device=self.device, generator=self.generator).to(dtype)

    def wide(self, *shape: int) -> Tensor:
        return self.normal(*shape, dtype=torch.float32)

    def weight(self, param: Param | tuple[int, int], format: Format | None = None) -> QuantTensor:
        """Random codes with the size of ordinary weights."""
        shape = param if isinstance(param, tuple) else (param.shape[0], param.shape[1])
        if format is None:
            assert isinstance(param, Param)
            format = format_of(param, self.layout)
        (n, k), want = shape, shape[1] ** -0.5
        if format is Format.BF16:
            return QuantTensor(format, (self.normal(n, k) * want).to(torch.bfloat16), shape)

        def codes(rows: int, cols: int, low: int = 0, high: int = 256) -> Tensor:
            out = torch.empty(rows, cols, dtype=torch.uint8, device=self.device)
            return out.random_(low, high, generator=self.generator)

        if format is Format.FP8:
            exponent = 127 + round(math.log2(want / 0.57))  # below 2, so never NaN
            scale = codes(-(-n // FP8_TILE), -(-k // FP8_TILE), exponent, exponent + 1)
            return QuantTensor(format, codes(n, k).bitwise_and_(0b10111111), shape, scale)
        assert format is Format.NVFP4, format
        scale = codes(n, k // NV_BLOCK, 0x30, 0x40)  # E4M3 from 0.5 to 2
        return QuantTensor(format, codes(n, k // 2), shape, scale, want / 3)

    def turn(self, rows: int, pairs: int) -> tuple[Tensor, Tensor]:
        angle = 3 * self.wide(rows, pairs)
        return angle.cos(), angle.sin()

    def _linear(self) -> Iterator[Case]:
        names = ("attn.wq_a", "attn.wq_b", "attn.wkv", "attn.wo_b", "attn.compressor.wkv")
        for name in (*names, "attn.indexer.wq_b", "attn.indexer.weights_proj"):
            out = torch.float32 if "compressor" in name else None
            yield self._product(name, self.params[name], out)
        yield self._product("head", self.params["head"], torch.float32)
        c, param = self.c, self.params["attn.wo_a"]
        depth = c.heads_per_group * c.head_dim
        whole = [self.weight((c.o_rank, depth), format_of(param, self.layout)) for _ in range(c.o_groups)]
        tiles = empty(whole[0].format, (c.o_groups * c.o_rank, depth), 1, 1, self.device)
        units = tiles.units // c.o_groups
        for g, part in enumerate(whole):
            one = tile(part)
            tiles.data[:, g * units : (g + 1) * units] = one.data
            tiles.scale[:, g * units : (g + 1) * units] = one.scale
            tiles.factor.copy_(one.factor)

        def grouped(rows: int) -> Made:
            x = self.normal(rows, c.o_groups, depth)
            moved = size_of(tiles) + size_of(x) + 2 * rows * c.o_groups * c.o_rank
            work = 2.0 * rows * c.o_groups * c.o_rank * depth
            # As attention leaves it.
            given = prompts.pack(x, tiles) if prompts.serves(tiles, x.dtype) else x
            return Made((x, whole), moved, work, gpu=(given, tiles))

        yield Case("linear", "grouped", f"wo_a {whole[0].format}", grouped)
        table = self.weight((c.vocab_size, c.hidden_size), Format.BF16)

        def embed(rows: int) -> Made:
            ids = torch.arange(rows, device=self.device) * 7919 % c.vocab_size
            return Made((ids, table, DTYPE), 4 * rows * c.hidden_size)

        yield Case("linear", "embed", "bf16", embed)

    def _product(self, name: str, param: Param, out: torch.dtype | None) -> Case:
        held = self.weight(param)
        tiles, (n, k) = tile(held), held.shape

        def make(rows: int) -> Made:
            x = self.normal(rows, k)
            moved = size_of(tiles) + size_of(x) + rows * n * (out or DTYPE).itemsize
            return Made((x, held, "a16", out), moved, 2.0 * rows * n * k, gpu=(x, tiles, "a16", out))

        return Case("linear", "linear", f"{name.removeprefix('attn.')} {n}x{k} {held.format}", make)

    def _bank(self, name: str, count: int) -> tuple[list[tuple[QuantTensor, ...]], Bank]:
        c, param = self.c, self.params[name]
        up, down = (c.expert_width, c.hidden_size), (c.hidden_size, c.expert_width)
        format = format_of(param, self.layout)
        experts = [tuple(self.weight(shape, format) for shape in (up, up, down)) for _ in range(count)]
        bank = Bank(empty(format, up, count, 2, self.device), empty(format, down, count, 1, self.device))
        for i, (w1, w3, w2) in enumerate(experts):
            put(bank.w13, i, 0, w1)
            put(bank.w13, i, 1, w3)
            put(bank.w2, i, 0, w2)
        return experts, bank

    def _experts(self) -> Iterator[Case]:
        c = self.c
        per_row = 6.0 * c.hidden_size * c.expert_width
        (shared,), one = self._bank("ffn.shared_experts.w1", 1)

        def ffn(rows: int) -> Made:
            x = self.normal(rows, c.hidden_size)
            moved, tail = size_of(one) + 2 * size_of(x), (c.swiglu_limit, "a16")
            return Made((x, shared, *tail), moved, rows * per_row, gpu=(x, one, *tail))

        yield Case("experts", "ffn", f"shared {one.w2.format}", ffn)
        experts, bank = self._bank("ffn.experts.0.w1", self.experts)

        def routed(rows: int) -> Made:
            x = self.normal(rows, c.hidden_size)
            order = torch.rand(rows, self.experts, device=self.device, generator=self.generator).argsort(1)
            ids = order[:, : c.experts_per_token].contiguous()
            weights = self.wide(rows, c.experts_per_token).abs() + 0.1
            used = ids.unique().numel() / self.experts
            tail = (c.swiglu_limit, "a16")
            moved, work = used * size_of(bank) + 3 * size_of(x), rows * c.experts_per_token * per_row
            return Made((x, ids, weights, experts, *tail), moved, work, gpu=(x, ids, weights, bank, *tail))

        yield Case("experts", "routed", f"{self.experts} experts {bank.w2.format}", routed)

    def _route(self) -> Iterator[Case]:
        c = self.c
        gate = self.weight(self.params["ffn.gate"])
        tiles, bias = tile(gate), 0.1 * self.wide(c.num_experts)

        def make(rows: int, is_hash: bool) -> Made:
            x = self.normal(rows, c.hidden_size)
            ids = torch.arange(rows * c.experts_per_token, device=self.device) * 7 % c.num_experts
            ids = ids.view(rows, -1)
            rest = (ids, c.route_scale) if is_hash else (bias, c.experts_per_token, c.route_scale)
            moved, work = size_of(tiles) + size_of(x), 2.0 * rows * c.num_experts * c.hidden_size
            return Made((x, gate, *rest), moved, work, gpu=(x, tiles, *rest))

        yield Case("route", "by_score", f"{c.num_experts} experts", lambda rows: make(rows, False))
        yield Case("route", "by_hash", f"{c.num_experts} experts", lambda rows: make(rows, True))

    def _rows(self) -> Iterator[Case]:
        for width in dict.fromkeys((self.c.hidden_size, self.c.q_rank)):
            weight = 1 + 0.1 * self.wide(width)

            def make(rows: int, width: int = width, weight: Tensor = weight) -> Made:
                x = self.normal(rows, width)
                return Made((x, weight, self.c.norm_eps), 2 * size_of(x))

            yield Case("rows", "rms_norm", f"{width} wide", make)

    def _mhc(self) -> Iterator[Case]:
        c, n, d = self.c, self.c.num_streams, self.c.hidden_size
        mixes = n * (n + 2)
        fn, base, scale = (n * d) ** -0.5 * self.wide(n * d, mixes), self.wide(mixes), self.wide(mixes)

        def pre(rows: int) -> Made:
            streams = self.normal(rows, n, d)
            rest = (fn, base, scale, c.norm_eps, c.hc_eps, c.sinkhorn_iters)
            moved = size_of(streams) * (1 + 1 / n) + size_of(fn)
            return Made((streams, *rest), moved, 2.0 * rows * mixes * n * d)

        def post(rows: int) -> Made:
            x, streams = self.normal(rows, d), self.normal(rows, n, d)
            gate, comb = self.wide(rows, n).abs(), self.wide(rows, n, n).abs()
            return Made((x, streams, gate, comb), 2 * size_of(streams) + size_of(x))

        def head(rows: int) -> Made:
            streams, few = self.normal(rows, n, d), fn[:, :n].contiguous()
            rest = (few, base[:n].contiguous(), scale[:n].contiguous(), c.norm_eps, c.hc_eps)
            return Made((streams, *rest), size_of(streams) * (1 + 1 / n) + size_of(few))

        readers = [(self.weight(self.params[f"attn.{name}"]), "a16") for name in ("wq_a", "compressor.wkv")]
        tiles = [(tile(held), how) for held, how in readers]

        def mix_in(rows: int) -> Made:
            x, streams = self.normal(rows, d), self.normal(rows, n, d)
            gate, comb = self.wide(rows, n).abs(), self.wide(rows, n, n).abs()
            mixing = (fn, base, scale, c.norm_eps, c.hc_eps, c.sinkhorn_iters)
            given = ((x, streams, gate, comb), mixing, 1 + 0.1 * self.wide(d))
            # Streams are read by both launches, written once; the input is made as its readers want it.
            moved = 3 * size_of(streams) + 2 * size_of(x) + size_of(fn)
            work = 2.0 * rows * mixes * n * d
            return Made((*given, readers, False), moved, work, gpu=(*given, tiles, False))

        for name, make in (("pre", pre), ("post", post), ("head", head), ("mix_in", mix_in)):
            yield Case("mhc", name, f"{n} streams of {d}", make)

    def _attention(self) -> Iterator[Case]:
        yield from self._ready()
        yield from self._pool()
        yield from self._attend()

    def _ready(self) -> Iterator[Case]:
        c = self.c
        weight, pairs = 1 + 0.1 * self.wide(c.head_dim), c.rope_dim // 2

        def queries(rows: int) -> Made:
            q = self.normal(rows, c.num_heads, c.head_dim)
            return Made((q, *self.turn(rows, pairs), c.norm_eps), 2 * size_of(q))

        def entries(rows: int) -> Made:
            x = self.normal(rows, c.head_dim)
            return Made((x, weight, *self.turn(rows, pairs), c.norm_eps), 2 * size_of(x))

        def store(rows: int) -> Made:
            x = self.normal(rows, c.head_dim)
            return Made((x, c.rope_dim, Format.KV8, True), 1.6 * size_of(x))

        yield Case("attention", "queries", f"{c.num_heads} heads", queries)
        yield Case("attention", "entries", f"{c.head_dim} wide", entries)
        yield Case("attention", "store", "kv8", store, rounds=True)

    def _where(self, rows: int) -> tuple[Tensor, Tensor, Tensor]:
        """Slots, positions and first positions of tokens of one sequence, the last at the context's end."""
        start = self.context - rows
        positions = torch.arange(start, self.context, device=self.device)
        return torch.zeros_like(positions), positions, torch.full_like(positions, start)

    def _pool(self) -> Iterator[Case]:
        for kind, m in (("csa", 2), ("hca", 1)):

            def make(rows: int, ratio: int = self.ratio[kind], m: int = m) -> Made:
                width = m * self.c.head_dim
                slots, positions, first = self._where(rows)
                closing = ((positions + 1) % ratio == 0).nonzero().squeeze(1)
                fresh = (self.wide(rows, width), self.wide(rows, width))
                tail = tuple(self.wide(1, m * ratio + 8, width) for _ in range(2))
                common = (closing, slots, positions, first, ratio, m == 2)
                return Made((*fresh, *tail, *common), size_of(fresh))

            yield Case("attention", "pool", kind, make)

    def _stores(self) -> tuple[CacheLayout, Tensor]:
        layout = cache_layout(self.c, -(-self.context // 256) * 256, 1)
        pages = torch.randperm(layout.num_pages, generator=self.generator, device=self.device)
        return layout, pages.int().unsqueeze(0)

    def _index(self) -> Iterator[Case]:
        c, ratio, pairs = self.c, self.ratio["csa"], self.c.rope_dim // 2
        layout, table = self._stores()
        entries = layout.page_tokens // ratio
        pool = empty_rows(Format.MXFP4, layout.num_pages * entries, c.index_dim, 0, DTYPE, self.device)
        fill_rows(pool, self.generator)
        norm = 1 + 0.1 * self.wide(c.index_dim)

        def queries(rows: int) -> Made:
            q = self.normal(rows, c.index_heads, c.index_dim)
            return Made((q, *self.turn(rows, pairs), True), 2 * size_of(q))

        def keys(rows: int) -> Made:
            x = self.normal(rows, c.index_dim)
            rest = (norm, *self.turn(rows, pairs), c.norm_eps, True, Format.MXFP4)
            return Made((x, *rest), 1.3 * size_of(x))

        def select(rows: int) -> Made:
            slots, positions, _ = self._where(rows)
            q = self.normal(rows, c.index_heads, c.index_dim)
            weights = self.wide(rows, c.index_heads)
            given = (q, weights, pool, table, slots, positions, ratio, entries, c.index_topk)
            seen = self.context // ratio
            moved = size_of(q) + seen * layout.key_bytes + 4 * rows * c.index_topk
            return Made(given, moved, 2.0 * rows * seen * c.index_heads * c.index_dim)

        def visible(rows: int) -> Made:
            slots, positions, _ = self._where(rows)
            return Made((table, slots, positions, ratio, entries), 4 * rows * (self.context // ratio))

        yield Case("index", "queries", f"{c.index_heads} heads", queries, rounds=True)
        yield Case("index", "keys", "mxfp4", keys, rounds=True)
        yield Case("index", "select", f"{c.index_topk} of {self.context // ratio}", select)
        yield Case("index", "visible_rows", f"{self.context // ratio}", visible)

    def _attend(self) -> Iterator[Case]:
        c = self.c
        layout, _ = self._stores()

        def kv8(count: int) -> QuantTensor:
            out = empty_rows(Format.KV8, count, c.head_dim, c.rope_dim, DTYPE, self.device)
            fill_rows(out, self.generator)
            return out

        ring, sinks = kv8(layout.ring_rows), self.wide(c.num_heads)
        for kind in ("sliding", "csa", "hca"):
            ratio = self.ratio.get(kind, 0)
            seen = self.context // ratio if ratio else 0
            pool = kv8(seen) if seen else None
            listed = min(seen, c.index_topk) if kind == "csa" else seen

            def make(
                rows: int, pool: QuantTensor | None = pool, seen: int = seen, listed: int = listed
            ) -> Made:
                slots, positions, first = self._where(rows)
                chosen = None
                if pool is not None:
                    order = torch.rand(rows, seen, device=self.device, generator=self.generator).argsort(1)
                    chosen = order[:, :listed].sort(1).values.contiguous()
                q = self.normal(rows, c.num_heads, c.head_dim)
                where = (slots, positions, first, c.window, layout.ring_rows)
                turn = self.turn(rows, c.rope_dim // 2)
                fresh = kv8(rows)
                # Row numbers as each backend's own index op gives them.
                places = (chosen, None if chosen is None else chosen.int())
                cpu, gpu = ((q, fresh, ring, *where, pool, place, sinks, *turn) for place in places)
                read = min(seen, rows * listed) + c.window + rows
                moved = 2 * size_of(q) + read * layout.entry_bytes
                work = 4.0 * rows * (c.window + listed) * c.num_heads * c.head_dim
                return Made(cpu, moved, work, gpu=gpu)

            yield Case("attention", "attend", f"{kind}, {c.window} + {listed} keys", make)

    def _sample(self) -> Iterator[Case]:
        kinds = {
            "greedy": pack(),
            "temperature 0.7, top-p 0.95": pack(temperature=0.7, top_p=0.95, seed=1),
            "greedy, 20 logprobs": pack(num_top=20),
        }
        for name, settings in kinds.items():

            def make(rows: int, settings: list[int] = settings) -> Made:
                logits = 4 * self.wide(rows, self.c.vocab_size)
                packed = torch.tensor([settings] * rows, device=logits.device)
                return Made((logits, packed, None), size_of(logits))

            yield Case("sample", "choose", name, make)
