"""Trains the embedded model on one GPU: schedule, data feed, loop. Resumes from its last checkpoint."""

import argparse
import importlib
import json
import queue
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor

from dsv4.config import LayerSpec, ModelConfig, Yarn, preset
from dsv4.text.tokenizer import Tokenizer
from recipes.tiny import plain
from recipes.tiny.mix import MAX_PASSES
from recipes.tiny.optim import Optimiser
from recipes.tiny.probe import share_right
from recipes.tiny.state import load_state, save_state
from recipes.tiny.twin import Notes, Twin

MAX_LENGTH = 4096
SHOW_SECONDS, SAVE_SECONDS = 15.0, 90.0
INDEX_WEIGHT, DRAFT_WEIGHT = 1.0, 0.3
BALANCE_RATE = 0.002


@dataclass(frozen=True)
class Phase:
    """A stretch of training: its part of the time, what the data is, what is already rounded."""

    name: str
    share: float
    rows: int
    length: int
    rounds_cache: bool
    rounds_weights: bool


def model_config(vocab_size: int) -> ModelConfig:
    """V4's kernel sizes: heads of 512, 64 index heads of 128, window 128, ratios 4 and 128, 4 streams."""
    kinds = (("sliding", 0), ("csa", 4), ("sliding", 0), ("hca", 128), ("csa", 4), ("sliding", 0))
    layers = tuple(LayerSpec(kind, ratio, index < 1) for index, (kind, ratio) in enumerate(kinds))  # type: ignore[arg-type]
    return replace(
        preset("tiny"),
        **{"hidden_size": 512, "vocab_size": vocab_size, "layers": layers, "num_heads": 8, "head_dim": 512},
        **{"rope_dim": 64, "q_rank": 128, "o_groups": 2, "o_rank": 128, "window": 128, "index_heads": 64},
        **{"index_dim": 128, "index_topk": 256, "num_experts": 16, "experts_per_token": 4},
        **{"expert_width": 64, "max_positions": 16384, "yarn": Yarn(4.0, 4096, 32.0, 1.0)},
    )


def initialise(twin: Twin, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    c, n = twin.config, twin.config.num_streams
    with torch.no_grad():
        for name, p in twin.tensors.items():
            noise = torch.randn(p.shape, generator=generator)
            if name.endswith("tid2eid"):
                value = torch.rand(c.vocab_size, c.num_experts, generator=generator).argsort(1)
                value = value[:, : c.experts_per_token]
            elif "hc_" in name and name.endswith("_fn"):
                value = noise * 0.02
            elif "hc_" in name and name.endswith("_scale"):
                value = torch.full(p.shape, 0.5)
            elif "hc_head" in name and name.endswith("_base"):
                value = torch.zeros(p.shape)
            elif "hc_" in name and name.endswith("_base"):
                # Start as a plain residual network: read all streams, write to all, keep each.
                value = torch.cat((torch.zeros(2 * n), (4 * torch.eye(n)).flatten()))
            elif p.dim() == 1:
                value = torch.ones(p.shape) if name.endswith("norm") else torch.zeros(p.shape)
            elif name.endswith("ape"):
                value = torch.zeros(p.shape)
            else:
                value = noise * (0.02 if name in ("embed", "head") else p.shape[-1] ** -0.5)
                if name.endswith(("wo_b", "w2")):
                    value = value * 0.3
            p.copy_(value)


def feed(
    corpus: Path,
    tokenizer: Path,
    seed: int,
    passes: float,
    jobs: "mp.Queue[Phase | None]",
    out: "mp.Queue[object]",
) -> None:
    """One data process: packs rows of the current phase until told to stop."""
    from recipes.tiny.mix import Mix

    torch.set_num_threads(1)
    mix = Mix(corpus, Tokenizer.load(tokenizer), seed=seed, split="train", max_passes=passes)
    phase = jobs.get()
    while phase is not None:
        ids, mask, segments = mix.next_batch(8, phase.length, phase.name)
        while True:
            try:
                out.put((phase.name, ids.astype(np.uint16), mask, segments), timeout=0.5)
                break
            except queue.Full:
                pass
            if not jobs.empty():
                break
        if not jobs.empty():
            phase = jobs.get()


def probes(corpus: Path, tokenizer: Path, out: "mp.Queue[object]") -> None:
    from recipes.tiny.probe import probe_rows

    torch.set_num_threads(1)
    out.put(probe_rows(corpus, Tokenizer.load(tokenizer)))


class Feeder:
    """Rows from several data processes; rows of an earlier phase are thrown away."""

    def __init__(self, corpus: Path, tokenizer: Path, seed: int, passes: float, workers: int) -> None:
        context = mp.get_context("spawn")
        self.out = context.Queue(maxsize=256)
        self.jobs = [context.Queue() for _ in range(workers)]
        self.processes = [
            context.Process(
                target=feed, args=(corpus, tokenizer, seed * 1000 + i, passes, jobs, self.out), daemon=True
            )
            for i, jobs in enumerate(self.jobs)
        ]
        self.probe = context.Queue()
        self.processes.append(
            context.Process(target=probes, args=(corpus, tokenizer, self.probe), daemon=True)
        )
        for process in self.processes:
            process.start()

    def batches(self, phase: Phase, device: str) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """ids, is_target, document of each token; all [rows, length]."""
        for jobs in self.jobs:
            jobs.put(phase)
        while True:
            parts: list[tuple[np.ndarray, ...]] = []
            while len(parts) * 8 < phase.rows:
                name, *rows = self.out.get(timeout=120)
                if name == phase.name:
                    parts.append(tuple(rows))
            ids, mask, segments = (
                np.concatenate(column)[: phase.rows] for column in zip(*parts, strict=True)
            )
            columns = (ids.astype(np.int64), mask, segments.astype(np.int32))
            tensors = (torch.from_numpy(t) for t in columns)
            if device.startswith("cuda"):
                tensors = (t.pin_memory() for t in tensors)
            a, b, c = (t.to(device, non_blocking=True) for t in tensors)
            yield a, b, c

    @property
    def waiting(self) -> int:
        """Batches that are ready: none for long means that data processes are the limit."""
        return self.out.qsize()

    def close(self) -> None:
        for process in self.processes:
            process.terminate()


def losses(
    twin: Twin, ids: Tensor, mask: Tensor, of: Tensor
) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
    """ids, mask (tokens to be predicted), of (their documents) [B, L] -> the loss, its parts, loads."""
    notes = Notes()
    twin = replace(twin.with_rounded(), documents=of, notes=notes)
    streams = twin.streams(ids)[-1]

    def mean(logits: Tensor, ahead: int) -> Tensor:
        """Of the tokens that many places on, within the document."""
        targets = F.pad(ids[:, ahead:], (0, ahead))
        wanted = F.pad(mask[:, ahead:] & (of[:, ahead:] == of[:, :-ahead]), (0, ahead))
        return (twin.ops.nats(logits, targets) * wanted).sum() / wanted.sum().clamp(min=1)

    main = mean(twin.head(streams), 1)
    draft = mean(twin.draft(streams, F.pad(ids[:, 1:], (0, 1))), 2)
    index = torch.stack(notes.index_losses).mean()
    parts = {"main": main, "draft": draft, "index": index}
    return main + DRAFT_WEIGHT * draft + INDEX_WEIGHT * index, parts, notes.loads


def balance(twin: Twin, loads: dict[str, Tensor]) -> None:
    """Nudge each router's bias towards experts that were chosen too seldom."""
    target = twin.config.experts_per_token / twin.config.num_experts
    with torch.no_grad():
        for name, load in loads.items():
            if f"{name}.bias" in twin.tensors:
                twin[f"{name}.bias"].add_(torch.sign(target - load), alpha=BALANCE_RATE)


def rate(done: float) -> float:
    """Warm up over 1 %, hold, fall to zero over the last 40 %."""
    return min(1.0, done / 0.01, max(0.0, (1 - done) / 0.4))


def train(
    twin: Twin,
    feeder: Feeder,
    phases: list[Phase],
    out: Path,
    device: str,
    seconds: float,
    peak: float = 1.0,
) -> None:
    """The schedule follows the clock, from the end of the first step on: that one waits for data."""
    optimiser, is_cuda = Optimiser(twin), device.startswith("cuda")
    step, tokens, edge, elapsed, shown, saved = 0, 0, 0.0, 0.0, 0.0, 0.0
    start: float | None = None
    probe: dict[str, list[Tensor]] = {}
    with (out / "log.jsonl").open("a") as log:

        def say(row: dict[str, Any]) -> None:
            line = json.dumps({"step": step, "seconds": round(elapsed, 1), **row})
            log.write(line + "\n")
            log.flush()
            sys.stdout.write(line + "\n")
            sys.stdout.flush()

        def look(twin: Twin) -> dict[str, float]:
            if not probe and not feeder.probe.empty():
                for name, rows in feeder.probe.get().items():
                    probe[name] = [torch.from_numpy(t).to(device) for t in rows]
            return {name: round(share_right(twin, *rows), 3) for name, rows in probe.items()}

        for phase in phases:
            edge += phase.share * seconds
            twin = twin.rounds(phase.rounds_cache, phase.rounds_weights, torch.bfloat16)
            batches = feeder.batches(phase, device)
            while elapsed < edge:
                ids, mask, of = next(batches)
                loss, parts, loads = losses(twin, ids, mask, of)
                loss.backward()
                optimiser.step(peak * rate(elapsed / seconds))
                balance(twin, loads)
                step, tokens = step + 1, tokens + ids.numel()
                if start is None:
                    if is_cuda:
                        torch.cuda.synchronize()
                    start = time.perf_counter()
                    before = tokens
                elapsed = time.perf_counter() - start
                if elapsed - shown >= SHOW_SECONDS:
                    values = {name: round(float(value.detach()), 4) for name, value in parts.items()}
                    pace = {
                        "phase": phase.name,
                        "tokens": tokens,
                        "per_second": round((tokens - before) / elapsed),
                    }
                    busiest = max(float(load.max()) for load in loads.values())
                    memory = torch.cuda.max_memory_allocated() >> 20 if is_cuda else 0
                    say(
                        pace
                        | values
                        | {"max_load": round(busiest, 3), "mib": memory, "queue": feeder.waiting}
                    )
                    shown = elapsed
                if elapsed - saved >= SAVE_SECONDS:
                    save_state(twin, out)
                    say(look(twin))
                    saved = elapsed
        sizes = save_state(twin, out)
        say(look(twin) | {"saved": sizes})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=540, help="training time after the first step")
    parser.add_argument(
        "--resume", type=Path, help="folder of an earlier run, whose state-*.pt to go on from"
    )
    parser.add_argument("--passes", type=float, default=MAX_PASSES, help="of the collection, in this run")
    parser.add_argument("--peak", type=float, default=1.0, help="the rate that is held, of the usual one")
    parser.add_argument("--rows", default="80,20,20", help="rows per step of each phase")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=13)
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    rows = [int(n) for n in args.rows.split(",")]
    phases = [
        Phase("main", 0.60, rows[0], 1024, False, False),
        Phase("long", 0.25, rows[1], MAX_LENGTH, True, False),
        Phase("final", 0.15, rows[2], MAX_LENGTH, True, True),
    ]
    feeder = Feeder(args.corpus, args.tokenizer, args.seed, args.passes, args.workers)
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    config = model_config(Tokenizer.load(args.tokenizer).vocab_size)
    ops = importlib.import_module("recipes.tiny.fused") if args.device.startswith("cuda") else plain
    twin = Twin.make(config, args.device, ops)
    initialise(twin, args.seed)
    if args.resume:
        load_state(twin, args.resume)
    try:
        train(twin, feeder, phases, args.out, args.device, args.seconds, args.peak)
    finally:
        feeder.close()


if __name__ == "__main__":
    main()
