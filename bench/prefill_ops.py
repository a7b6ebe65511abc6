"""Times what a prompt's step launches, op by op, beside what each must take at least.

    python -m bench.prefill_ops --tokens 16,64,256,1024,8192 --contexts 4096,131072,1040000

A step of the model runs, two layers of every kind at V4-Flash's sizes, as the engine runs it: up to 1,024
tokens padded, as a graph has it. Every call of a kernel's launcher is kept, with what it was given; those of
one name are timed in a graph, layer after layer, so that weights are not in the cache. So the table has what
a step launches, and nothing else.

For each number of tokens a table: microseconds of a call, calls in a pass of 43 layers, milliseconds of all
and their floor: bytes at 4.6 TB/s, or products at 790 TFLOP/s, in FP8 at twice that. Longer contexts add what
depends on them. `layer`: a whole one by its kind, as it runs. The last line is all of it in JSON.
"""

import argparse
import inspect
import json
import statistics
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from dsv4.cache.store import Cache
from dsv4.config import preset
from dsv4.gpu.tiles import SLICE, Tiled
from dsv4.lab.bench.decode import fill
from dsv4.lab.bench.subject import DTYPE, cache_layout, needed_bytes
from dsv4.lab.synthetic import make_weights, with_experts
from dsv4.model.bundle import Bundle, Numerics
from dsv4.model.model import Model
from dsv4.model.prompt import Prompt
from dsv4.model.step import SIZES, Step
from dsv4.ops import IMPLEMENTATIONS, Ops
from dsv4.ops.attention import prefill as attention
from dsv4.ops.attention import prefill_sm90 as attention_sm90
from dsv4.ops.experts import prefill_gemm as sums
from dsv4.ops.index import prefill as index
from dsv4.ops.linear import prefill as linear
from dsv4.ops.linear import prefill_product as product
from dsv4.ops.linear.prefill_packed import ROW_GROUP, Packed
from dsv4.ops.mhc import prefill as mhc
from dsv4.ops.mhc import prefill_sm90 as streams
from dsv4.ops.route import prefill as route
from dsv4.ops.rows import prefill as rows
from dsv4.ops.rows import quantize
from dsv4.quant.formats import QuantTensor

WHOLE = preset("flash")
BYTES_US, FLOPS_US = 4.6e6, 790e6  # of a microsecond
EACH = 2  # layers of a kind
# What launches kernels, or is told apart from what does.
WATCHED = (
    (product, ("sort", "pack_as", "gather", "product", "gate_up", "down")),
    (streams, ("open_site", "close_site")),
    (attention_sm90, ("attend",)),
    (attention, ("attend", "_joined", "queries", "entries", "store", "put_rows", "pool", "put_tail")),
    (sums, ("sum_choices",)),
    (quantize, ("round_values", "pack")),
    (rows, ("rms_norm",)),
    (linear, ("embed",)),
    (index, ("keys", "queries", "select", "visible_rows")),
    (route, ("_choose",)),
    (mhc, ("pre", "post", "head")),
)
# Ops that differ between kinds of layers.
BY_KIND = ("attend", "keys decoded", "attention pool", "attention put_tail")
BY_CONTEXT = ("attend", "keys decoded", "index select", "layer")


@dataclass(frozen=True)
class Row:
    tokens: int
    context: int
    op: str
    us: float
    uses: int  # in a pass of all layers
    floor_us: float
    bound: str

    def line(self) -> str:
        a_pass, floor = self.us * self.uses / 1e3, self.floor_us * self.uses / 1e3
        share = f"{self.floor_us / self.us:5.0%}" if self.floor_us else "    -"
        name = f"{self.op:38} {self.us:9.1f} {self.uses:5d}"
        return f"{name} {a_pass:9.2f} {floor:8.2f} {share} {self.bound}"


@dataclass(frozen=True)
class Call:
    op: str
    kind: str
    run: Callable[[], Any]
    flop: float
    num_bytes: float
    is_fp8: bool

    def floor(self) -> tuple[float, str]:
        by_bytes, by_flop = self.num_bytes / BYTES_US, self.flop / (FLOPS_US * (1 + self.is_fp8))
        return (by_bytes, "memory") if by_bytes >= by_flop else (by_flop, "products")


def tensors(value: Any) -> Iterator[Tensor | Tiled]:
    if isinstance(value, Tensor | Tiled):
        yield value
    elif isinstance(value, dict):
        yield from tensors(list(value.values()))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors(item)
    elif is_dataclass(value):
        yield from tensors([getattr(value, field.name) for field in fields(value)])


def size(*values: Any) -> float:
    """Bytes of all tensors in these, each once."""
    found = {}
    for one in tensors(values):
        data = one.data if isinstance(one, Tiled) else one
        found[data.data_ptr()] = (
            needed_bytes(one) if isinstance(one, Tiled) else one.numel() * one.element_size()
        )
    return float(sum(found.values()))


class Recorder:
    """Keeps every call of what is watched while it is open. A call within another stands for it."""

    def __init__(self, weights: dict[str, Any]) -> None:
        self.calls: list[Call] = []
        self.kind = "ends"
        self.names: dict[int, str] = {}
        for name, held in weights.items():
            for tiled in (held.w13, held.w2) if hasattr(held, "w13") else (held,):
                if isinstance(tiled, Tiled):
                    part = {2: " w13", 1: " w2"}[tiled.halves] if hasattr(held, "w13") else ""
                    self.names[tiled.data.data_ptr()] = name.split(".", 2)[-1].removeprefix("attn.") + part
        self.patches = ExitStack()

    def __enter__(self) -> "Recorder":
        for module, names in WATCHED:
            for name in names:
                watched = partial(self._call, module, name, getattr(module, name))
                self.patches.enter_context(patch.object(module, name, watched))
        return self

    def __exit__(self, *_: object) -> None:
        self.patches.close()

    def _call(self, module: Any, name: str, function: Callable[..., Any], *given: Any, **named: Any) -> Any:
        before = len(self.calls)
        result = function(*given, **named)
        if len(self.calls) == before:
            arguments = inspect.signature(function).bind(*given, **named).arguments
            op, flop, moved = self._work(module, name, arguments, result)
            x = arguments.get("x")
            is_fp8 = isinstance(x, Packed) and x.mode.is_fp8
            kind = self.kind if op.startswith(BY_KIND) else ""
            run = partial(function, *given, **named)
            self.calls.append(Call(f"{op} {kind}".strip(), self.kind, run, flop, moved, is_fp8))
        return result

    def _work(self, module: Any, name: str, a: dict[str, Any], result: Any) -> tuple[str, float, float]:
        """The op's name, its arithmetic and its bytes."""
        moved = size([value for key, value in a.items() if key != "page_table"], result)
        weight = a.get("weight")
        whose = self.names.get(weight.data.data_ptr(), "?") if isinstance(weight, Tiled) else ""
        if module is product and name in ("product", "gate_up", "down"):
            x, by = a["x"], a.get("by")
            count, used = (x.rows, 1.0) if by is None else (routed_rows(by), used_experts(by) / weight.count)
            flop = 2.0 * count * weight.shape[0] * weight.shape[1] * weight.halves
            columns = x.data.shape[1] * SLICE
            per_row = x.mode.slice_bytes / ROW_GROUP / SLICE * columns * x.matrices
            y_row = a["y"].numel() / len(a["y"]) * a["y"].element_size()
            return f"product {whose}", flop, count * (per_row + y_row) + used * needed_bytes(weight)
        if module is product and name in ("pack_as", "gather"):
            by = a.get("by")
            share = 1.0 if by is None else routed_rows(by) / by.capacity
            op = "gather" if name == "gather" else f"{a['mode'].packing} of {a['x'].shape[-1]}"
            return op, 0.0, size(a["x"]) + share * size(result)
        if module is attention_sm90:
            seen, keys = visible(a)
            flop = 4.0 * a["q"].shape[1] * a["q"].shape[2] * keys
            return "attend", flop, size(a["q"], a["out"]) + 2.0 * a["q"].shape[2] * min(seen, keys)
        if module is attention and name == "_joined":
            seen, _ = visible({**a, "window": 0, "has_pool": a["pool"] is not None, "rows": None})
            row = 2.0 * a["ring"].shape[1] + a["ring"].num_bytes / a["ring"].shape[0]
            return "keys decoded for attend", 0.0, row * (a["ring"].shape[0] + a["fresh"].shape[0] + seen)
        if module is index and name == "select":
            seen = float(((a["positions"] + 1) // a["ratio"]).clamp(min=0).sum())
            most = int(a["positions"].max() + 1) // a["ratio"]
            pool = most * a["pool"].num_bytes / a["pool"].shape[0]
            flop = 2.0 * a["q"].shape[1] * a["q"].shape[2] * seen
            return "index select", flop, size(a["q"], a["weights"], result) + pool
        if name in ("put_rows", "put_tail"):
            values = [a["values"], a.get("scores", a["values"])][: 1 + (name == "put_tail")]
            row = sum(size(v) / (v.shape[0] if isinstance(v, QuantTensor | Tensor) else 1) for v in values)
            return f"attention {name}", 0.0, 2.0 * row * int((a["rows"] >= 0).sum())
        if module is linear:  # rows of a table
            return "embed", 0.0, 2.0 * size(result)
        if module is product:
            return "sort by expert", 0.0, moved
        if module is streams:
            return f"mhc {name.removesuffix('_site')}", 0.0, moved
        if module in (rows, quantize):
            what = "norm" if module is rows or a.get("norm_weight") is not None else "round"
            return f"{what} of {a['x'].shape[-1]}", 0.0, moved
        return f"{named(module)} {name.removeprefix('_')}", 0.0, moved


def named(module: Any) -> str:
    *_, op, last = module.__name__.split(".")
    return op if last == "prefill" else last


def routed_rows(by: product.Sorted) -> int:
    return int((by.pairs[: int(by.counts[1]) * ROW_GROUP] >= 0).sum())


def used_experts(by: product.Sorted) -> int:
    return by.tiles[: int(by.counts[0]), 0].unique().numel()


def visible(a: dict[str, Any]) -> tuple[float, float]:
    """Entries that the last token sees, and keys of all tokens."""
    positions = a["positions"]
    keys = float((positions + 1).clamp(0, a["window"]).sum())
    if not a["has_pool"]:
        return 0.0, keys
    seen = ((positions + 1) // a["ratio"]).clamp(min=0)
    listed = seen if a["rows"] is None else (a["rows"] >= 0).sum(1)
    return float(seen.max()), keys + float(listed.sum())


def microseconds(calls: list[Callable[[], Any]]) -> float:
    """Of one: the median of five replays of all of them, several times over."""
    for call in calls:
        call()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def timed(run: Callable[[], Any]) -> float:
        begin.record()
        run()
        end.record()
        end.synchronize()
        return 1e3 * begin.elapsed_time(end)

    def all_of() -> None:
        for call in calls:
            call()

    times = max(1, min(16, int(1500 / timed(all_of))))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(times):
            all_of()
    graph.replay()
    return statistics.median(timed(graph.replay) for _ in range(5)) / (times * len(calls))


def uses(calls: list[Call]) -> int:
    """Of all calls of a name in the layers that ran, those of a pass."""
    kinds = [layer.kind for layer in WHOLE.layers]
    return round(sum(kinds.count(call.kind) / EACH if call.kind != "ends" else 1 for call in calls))


class Subject:
    def __init__(self, layout: str, activations: str, experts: int, device: torch.device) -> None:
        kinds = {spec.kind: spec for spec in WHOLE.layers}
        config = replace(with_experts(WHOLE, experts), layers=tuple(kinds.values()) * EACH)
        ops = Ops.choose("cuda", **dict.fromkeys(IMPLEMENTATIONS, "gpu"))
        weights = make_weights(config, layout, str(device))
        self.bundle = Bundle(config, weights, ops, Numerics(DTYPE, activations, True))  # type: ignore[arg-type]
        self.device = device

    def rows(self, tokens: int, context: int) -> Iterator[Row]:
        config = self.bundle.config
        layout = cache_layout(config, -(-(context + tokens) // 256) * 256, 1)
        cache, model = Cache(layout, self.device, DTYPE), Model(self.bundle, layout.max_context, self.device)
        fill(cache)
        span = (0, context, [number * 7919 % config.vocab_size for number in range(tokens)])
        if tokens <= SIZES[-1]:
            prompt = Prompt(model, cache, next(size for size in SIZES if size >= tokens))
            prompt.load([span])
            step = prompt._step()
        else:
            step = Step.build([span], self.device)
        model.forward(step, cache)  # compiles
        layers: list[tuple[str, Callable[[], Any]]] = []
        recorder = Recorder(dict(self.bundle.weights.tensors))

        def watched(block: Any, kind: str) -> Callable[..., Any]:
            def call(residual: Any, *rest: Any) -> Any:
                recorder.kind = kind
                kept = replace(residual)
                layers.append((kind, lambda: block(replace(kept), *rest)))
                out = block(residual, *rest)
                recorder.kind = "ends"
                return out

            return call

        blocks = model.blocks
        model.blocks = [watched(b, s.kind) for b, s in zip(blocks, config.layers, strict=True)]  # type: ignore[misc]
        with recorder:
            model.logits(model.forward(step, cache)[-1:])
        by_name: dict[str, list[Call]] = {}
        for call in recorder.calls:
            by_name.setdefault(call.op, []).append(call)
        for name, calls in by_name.items():
            floors = [call.floor() for call in calls]
            us = microseconds([call.run for call in calls])
            least = statistics.mean(floor for floor, _ in floors)
            yield Row(tokens, context, name, us, uses(calls), least, floors[0][1])
        kinds = [layer.kind for layer in WHOLE.layers]
        for kind in dict.fromkeys(kinds):
            us = microseconds([run for its, run in layers if its == kind])
            yield Row(tokens, context, f"layer {kind}", us, kinds.count(kind), 0.0, "")


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--tokens", type=numbers, default=[16, 64, 256, 1024, 8192])
    parser.add_argument("--contexts", type=numbers, default=[4096, 131072, 1040000])
    parser.add_argument("--layout", default="nvfp4")
    parser.add_argument("--activations", default="a16")
    parser.add_argument("--experts", type=int, default=192)
    wanted = parser.parse_args()
    found: list[Row] = []
    with torch.inference_mode():
        subject = Subject(wanted.layout, wanted.activations, wanted.experts, torch.device("cuda", 0))
        for tokens in wanted.tokens:
            for context in wanted.contexts:
                is_first = context == wanted.contexts[0]
                print(f"\n{tokens:,} tokens after {context:,} ({wanted.layout}, {wanted.activations})")
                print(f"{'op':38} {'us':>9} {'uses':>5} {'ms/pass':>9} {'floor':>8} share")
                rows = list(subject.rows(tokens, context))
                shown = [row for row in rows if is_first or row.op.startswith(BY_CONTEXT)]
                for row in shown:
                    print(row.line(), flush=True)
                ops = [row for row in rows if not row.op.startswith("layer")]
                alone, floor = (
                    sum(v * row.uses for row, v in pairs) / 1e3
                    for pairs in ([(row, row.us) for row in ops], [(row, row.floor_us) for row in ops])
                )
                whole = sum(row.us * row.uses for row in rows if row.op.startswith("layer")) / 1e3
                print(
                    f"a pass: {whole:.2f} ms in layers as they run, {alone:.2f} op by op, floor {floor:.2f}"
                )
                found += shown
                torch.cuda.empty_cache()
    lines = [{k: round(v, 2) if isinstance(v, float) else v for k, v in vars(row).items()} for row in found]
    print(
        json.dumps(
            {"bench": "prompt ops", "layout": wanted.layout, "activations": wanted.activations, "rows": lines}
        )
    )


if __name__ == "__main__":
    main()
