"""Speed of the quantisers of prompts beside the memory ceiling; of norm and quantiser beside the norm alone.

    python -m bench.quantisers --rows 8192        # Flash's widths, on a GPU

Bytes are those that must move: rows read once, what is made of them written once. The ceiling is a copy of 1
GiB, bytes read plus written, in the same run, by torch or by the quantiser's own kernel without rounding, the
faster. Inputs change from launch to launch: no cache holds them.
"""

import argparse
import json
import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4.ops.rows import prefill as rows
from dsv4.ops.rows import quantize

SETS, LAUNCHES, ROUNDS = 4, 8, 7
WIDTHS = {"q_low": 1024, "hidden": 2048, "x": 4096, "wo_b's input": 8192}


def microseconds(run: Callable[[int], object]) -> float:
    """Of one launch, in graphs of several, the median."""
    for i in range(SETS):
        run(i)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(LAUNCHES):
            run(i % SETS)
    times = []
    for _ in range(ROUNDS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1e3 * begin.elapsed_time(end) / LAUNCHES)
    return statistics.median(times)


@dataclass(frozen=True)
class Line:
    what: str
    width: int
    us: float
    bytes: float

    def show(self, ceiling: float, beside: float | None = None) -> dict[str, object]:
        rate = self.bytes / self.us / 1e3
        out: dict[str, object] = {
            **{"what": self.what, "width": self.width, "us": round(self.us, 2)},
            **{"gb_per_second": round(rate), "share": round(rate / ceiling, 3)},
        }
        extra = "" if beside is None else f"   {self.us / beside - 1:+.1%} beside the norm alone"
        print(
            f"{self.what:28} {self.width:6} {self.us:9.2f} µs {rate:7.0f} GB/s {rate / ceiling:6.1%}{extra}"
        )
        return out if beside is None else {**out, "over_norm": round(self.us / beside - 1, 3)}


def copy_ceiling() -> float:
    """GB/s."""
    source = torch.empty(65536, 8192, dtype=torch.bfloat16, device="cuda").normal_()
    target = torch.empty_like(source)
    ways: list[Callable[[int], object]] = [
        lambda i: target.copy_(source),
        lambda i: quantize.round_values(source, target, "a16", overlap=False),
    ]
    return 2 * source.nbytes / min(map(microseconds, ways)) / 1e3


def measure(count: int, width: int, ceiling: float) -> list[dict[str, object]]:
    random = torch.Generator("cuda").manual_seed(width)
    x: list[Tensor] = [
        torch.randn(count, width, device="cuda", generator=random).bfloat16() for _ in range(SETS)
    ]
    out, made = [torch.empty_like(t) for t in x], [torch.empty_like(t) for t in x]
    weight = torch.rand(width, device="cuda", generator=random) + 0.5
    whole = 2 * count * width
    coded = count * (width / 2 + width / 16 + 4)
    lines = []

    def timed(what: str, size: float, run: Callable[[int], object], beside: float | None = None) -> float:
        line = Line(what, width, microseconds(run), size)
        lines.append(line.show(ceiling, beside))
        return line.us

    def values(i: int, how: str, norm: Tensor | None = None, normed: Tensor | None = None) -> None:
        quantize.round_values(x[i], out[i], how, norm_weight=norm, eps=1e-6, normed=normed, overlap=False)

    for how in ("a8", "a4"):
        timed(f"{how} values", 2 * whole, lambda i, how=how: values(i, how))
    timed("a4 codes", whole + coded, lambda i: quantize.pack(x[i]))
    alone = timed("norm", 2 * whole, lambda i: rows.rms_norm(x[i], weight, 1e-6))
    for how in ("a8", "a4"):
        timed(f"norm and {how}", 2 * whole, lambda i, how=how: values(i, how, weight), alone)
        timed(f"norm, kept, and {how}", 3 * whole, lambda i, how=how: values(i, how, weight, made[i]), alone)
    timed(
        "norm and a4 codes", whole + coded, lambda i: quantize.pack(x[i], norm_weight=weight, eps=1e-6), alone
    )
    if width <= 2048:
        pairs = [
            torch.randn(count, 2 * width, device="cuda", generator=random).bfloat16() for _ in range(SETS)
        ]
        timed("SwiGLU and a4 codes", 2 * whole + coded, lambda i: quantize.swiglu_pack(pairs[i], None, 10.0))
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=8192)
    given = parser.parse_args()
    ceiling = copy_ceiling()
    print(f"{torch.cuda.get_device_name()}, {given.rows} rows; a copy: {ceiling:.0f} GB/s")
    found = [line for width in WIDTHS.values() for line in measure(given.rows, width, ceiling)]
    print(json.dumps({"bench": "quantisers", "rows": given.rows, "copy": round(ceiling), "lines": found}))


if __name__ == "__main__":
    main()
