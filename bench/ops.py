"""Every backend of every op, and every launch of a decode step, timed alone; what computes wrongly is not.

    python -m bench.ops --preset flash --op attention --op decode --tokens 8192

Backends are timed if they agree with the reference on a few rows. The last line is JSON; exit code 1 if one
does not agree.
"""

import argparse
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from bench import arguments
from bench.cases import Case, Made, Maker
from dsv4.cache.layout import CacheLayout
from dsv4.config import preset
from dsv4.errors import ConfigError
from dsv4.lab.bench.ceiling import gpu, measure_matmul, measure_read, timed
from dsv4.lab.bench.decode import Session, Wanted, release
from dsv4.lab.bench.profile import ENDS, SITE, kinds_of
from dsv4.lab.bench.subject import DTYPE, Subject, check_fits, needed_bytes, other_bytes, synthetic
from dsv4.model.step import Step
from dsv4.ops import IMPLEMENTATIONS
from dsv4.ops.agree import call, difference, outputs, relative
from dsv4.ops.cases import ROUNDINGS, SUMS
from dsv4.ops.linear.decode import MatVec

PRESETS = ("flash", "pro")
CHECKED_ROWS = 3
CHECKED_LAYERS, CHECKED_STEPS = 4, 5
# Of the logits after CHECKED_LAYERS layers: BF16 rounds at every step, and differently in the two paths.
LOGITS_ERROR = 0.1
REPEATS = 16  # of a launch that a step has once
BUDGET_MS, MIN_ROUNDS, MAX_ROUNDS = 200.0, 3, 50


@dataclass(frozen=True)
class Wished:
    """`experts`: how many of a layer's are made. `context`: tokens that queries look back on."""

    presets: tuple[str, ...] = PRESETS
    ops: tuple[str, ...] = ()
    tokens: int = 512
    experts: int = 16
    context: int = 8192
    layout: str = "modelopt"

    def __post_init__(self) -> None:
        if unknown := [name for name in self.ops if name not in (*IMPLEMENTATIONS, "decode")]:
            raise ConfigError(f"unknown ops {unknown}; use {', '.join(IMPLEMENTATIONS)} or decode")
        if not 1 <= self.tokens <= self.context:
            raise ConfigError(f"tokens is {self.tokens}, expected 1 to the context, {self.context}")
        for name in self.presets:
            self.subject(name)
            ratio = next(layer.ratio for layer in preset(name).layers if layer.kind == "csa")
            if self.context < ratio:
                raise ConfigError(
                    f"context is {self.context}, expected at least {ratio}: one compressed entry"
                )

    def subject(self, name: str, layers: int | None = None) -> Subject:
        return synthetic(name, min(self.experts, preset(name).num_experts), layers, self.layout)

    def step(self, name: str) -> Wanted:
        """The decode step whose launches are timed."""
        return Wanted(min(self.context, preset(name).max_positions // 2), 1, 1)

    def wants(self, op: str) -> bool:
        return not self.ops or op in self.ops


@dataclass(frozen=True)
class Result:
    """One backend on one case. `refused`: why it was not timed. `floor_us`: of bytes or arithmetic alone."""

    model: str
    op: str
    backend: str
    name: str
    us: float | None = None
    floor_us: float | None = None
    bound: str = ""
    refused: str = ""

    def as_dict(self) -> dict[str, Any]:
        kept = {k: v for k, v in vars(self).items() if v not in (None, "")}
        return {k: round(v, 3) if isinstance(v, float) else v for k, v in kept.items()}


def check_memory(wished: Wished, free: int) -> None:
    """Refuse before anything is measured; the decode step takes the most, all its layers being there."""
    for name in wished.presets if wished.wants("decode") else ():
        subject, wanted = wished.subject(name), wished.step(name)
        check_fits(subject, other_bytes(wanted.layout(subject.config), (wanted.rows,)), free)


def floor(num_bytes: float, flops: float, read: float, matmul: float) -> tuple[float, str]:
    """Microseconds that the bytes, or the arithmetic, take at best; and which of them it is."""
    by_bytes, by_flops = num_bytes / read * 1e6, flops / matmul * 1e6
    return (by_bytes, "memory") if by_bytes >= by_flops else (by_flops, "arithmetic")


def check(case: Case, backend: str) -> str:
    """What is wrong with a few rows, against the reference on the same GPU; or nothing."""
    if backend == "cpu":
        return ""
    try:
        made = case.make(CHECKED_ROWS)
        got, want = (outputs(_call(case, made, name)) for name in (backend, "cpu"))
    # A kernel that cannot be built raises whatever its compiler does; that is the finding.
    except Exception as error:  # noqa: BLE001
        return f"raised {type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return difference(got, want, (ROUNDINGS if case.rounds else SUMS)[DTYPE])


def _call(case: Case, made: Made, backend: str) -> Any:
    return call(case.op, case.function, backend, made.of(backend))


def measure(wished: Wished, read: float, matmul: float, device: torch.device) -> Iterator[Result]:
    """Results one by one, model after model."""
    for name in wished.presets:
        maker = Maker(preset(name), wished.layout, wished.experts, wished.context, device)
        for case in maker.cases(wished.wants):
            for backend in IMPLEMENTATIONS[case.op]:
                yield _timed(name, case, backend, wished.tokens, read, matmul)
        if wished.wants("decode"):
            del maker
            release()
            yield from launches(wished, name, read, device)


def _timed(model: str, case: Case, backend: str, tokens: int, read: float, matmul: float) -> Result:
    what = (model, f"{case.op}.{case.function}", backend, case.name)
    if problem := check(case, backend):
        return Result(*what, refused=problem)
    made = case.make(tokens)
    work = partial(_call, case, made, backend)
    (first,) = timed(work, 1, warm=1)
    rounds = max(MIN_ROUNDS, min(MAX_ROUNDS, int(BUDGET_MS / max(first, 1e-3))))
    times = sorted(timed(work, rounds, warm=1))
    least, bound = floor(made.num_bytes, made.flops, read, matmul)
    return Result(*what, 1e3 * times[len(times) // 2], least, bound)


def launches(wished: Wished, name: str, read: float, device: torch.device) -> Iterator[Result]:
    """A decode step's launches at batch 1, those of one name and layer kind in a graph of their own, so that
    each meets weights that are not in the cache. Checked on the first layers, timed on all of them."""
    wanted, subject = wished.step(name), wished.subject(name)
    if problem := check_step(wished, name, device):
        yield Result(name, "decode step", "gpu", "all launches", refused=problem)
        return
    session = Session(subject.bundle(device), wanted, device)
    decoder = session.decoder
    decoder.step()
    torch.cuda.synchronize()
    names = [launch.name for launch in decoder.launches]
    groups: dict[tuple[str, str], list[Any]] = {}
    for which, kind, launch in zip(names, kinds_of(names, subject.config), decoder.launches, strict=True):
        groups.setdefault((which, kind), []).append(launch.run)
    for (which, kind), calls in groups.items():
        # A graph's own start would be a good part of a single launch; the head's weights fill the cache anew.
        run = calls * (REPEATS if kind == ENDS else 1)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in run:
                call()
        decoder.buffers.positions.fill_(wanted.start(subject.config))  # sampling moves it on
        times = sorted(timed(graph.replay, 20))
        needed = sum(map(weight_bytes, calls)) / len(calls)
        needed += state_bytes(which, kind, wanted.layout(subject.config), wanted.start(subject.config))
        us, least = 1e3 * times[len(times) // 2] / len(run), needed / read * 1e6 if needed else None
        what = (name, f"decode {which}", "gpu", f"{kind}, {len(calls)} per step")
        yield Result(*what, us, least, "memory" if least else "latency")


def weight_bytes(launch: Any) -> float:
    """Of a planned product: its weights, of a bank those of the experts that the step chose."""
    planned = getattr(launch, "__self__", None)
    if not isinstance(planned, MatVec):
        return 0.0
    products, tasks, *_ = planned.keep
    total = 0.0
    for product in products:
        of_one = needed_bytes(product.weight) / product.weight.count
        chosen = int((tasks.expert.unique() >= 0).sum()) if tasks and product.who != "rows" else 1
        total += of_one * chosen
    return total


def state_bytes(launch: str, kind: str, layout: CacheLayout, position: int) -> int:
    """What a launch of one row reads beside tiled weights, if that is much: cache rows, a mixing matrix."""
    c = layout.config
    if launch == SITE:
        mixes = c.num_streams * (1 if kind == ENDS else c.num_streams + 2)
        return 4 * mixes * c.num_streams * c.hidden_size
    ratio = next((layer.ratio for layer in c.layers if layer.kind == kind), 0)
    visible = position // ratio if ratio else 0
    if launch == "index scores":
        return visible * layout.key_bytes
    if launch == f"attend {kind}":
        listed = min(visible, c.index_topk) if kind == "csa" else visible
        return (c.window + listed) * layout.entry_bytes
    return 0


def check_step(wished: Wished, name: str, device: torch.device) -> str:
    """What is wrong with the decode kernels' logits, or nothing: against Model.forward through the ops' GPU
    backends, each held to the reference by `check`, on the same tokens, cache and weights."""
    subject = wished.subject(name, min(CHECKED_LAYERS, preset(name).num_layers))
    session = Session(subject.bundle(device), wished.step(name), device)
    f, errors = session.decoder.buffers, []
    for _ in range(CHECKED_STEPS):
        span = (0, int(f.positions[0]), [int(f.ids[0])])
        streams = session.model.forward(Step.build([span], device), session.cache)
        want = session.model.logits(streams)[0]
        session.decoder.step()
        if not bool(torch.isfinite(f.logits[0]).all()):
            return "the logits hold NaN or infinity"
        errors.append(relative(f.logits[0], want))
    # The median: an expert chosen by a hair may be another in one step, a wrong kernel errs in most.
    if (error := statistics.median(errors)) > LOGITS_ERROR:
        return f"logits differ from the ops' by {error:.1e}, expected at most {LOGITS_ERROR}"
    return ""


def line_of(result: Result) -> str:
    what = f"{result.model:6} {result.op:24} {result.backend:8} {result.name:42}"
    if result.refused or result.us is None:
        return f"{what} not timed: {result.refused}"
    floor = result.floor_us
    share = f"{floor:9.1f} {floor / result.us:6.1%} of {result.bound}" if floor else f"{'':16} {result.bound}"
    return f"{what} {result.us:12,.1f} {share}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", action="append", help="sizes of flash or pro; repeatable; default: both")
    parser.add_argument(
        "--op", action="append", help="only this op, or decode (a step's launches); repeatable"
    )
    parser.add_argument("--tokens", type=int, default=512, help="rows of each call")
    parser.add_argument("--experts", type=int, default=16, help="experts of a layer that are made")
    parser.add_argument("--context", type=int, default=8192, help="tokens that queries look back on")
    parser.add_argument("--layout", default="modelopt", help="modelopt or nvfp4")
    given = parser.parse_args()
    wished = Wished(
        *(tuple(given.preset or PRESETS), tuple(given.op or ()), given.tokens, given.experts, given.context),
        layout=given.layout,
    )
    device = gpu()
    check_memory(wished, torch.cuda.mem_get_info(device)[0])
    results = []
    with torch.inference_mode():
        read, matmul = measure_read(device), measure_matmul(device)
        print(f"{'model':6} {'op':24} {'backend':8} {'case':42} {'µs':>12} {'floor µs':>9} {'share':>6}")
        for result in measure(wished, read, matmul, device):
            results.append(result)
            print(line_of(result), flush=True)
    refused = sum(bool(result.refused) for result in results)
    arguments.finish(
        {
            **{"bench": "ops", "models": list(wished.presets), "tokens": given.tokens},
            **{"experts": given.experts, "context": given.context, "layout": given.layout},
            **{"ceiling_gb_per_second": round(read / 1e9, 1), "matmul_tflops": round(matmul / 1e12, 1)},
            **{"refused": refused, "results": [result.as_dict() for result in results]},
        }
    )
    sys.exit(bool(refused))


if __name__ == "__main__":
    arguments.run(main)
