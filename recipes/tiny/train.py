"""Trains the embedded model on one GPU: schedule, data feed, loop. Resumes from its last checkpoint."""

import argparse
import importlib
import json
import queue
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor

from dsv4.config import LayerSpec, ModelConfig, Yarn, preset
from dsv4.text.tokenizer import Tokenizer
from recipes.tiny import plain
from recipes.tiny.optim import Optimiser
from recipes.tiny.probe import recall_rate
from recipes.tiny.twin import Notes, Twin

MAX_LENGTH = 4096
PROBE_ROWS = 48
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
    """All three attention kinds in eight layers, about 14 M parameters."""
    kinds = [
        ("sliding", 0),
        ("csa", 4),
        ("hca", 128),
        ("csa", 4),
        ("hca", 128),
        ("csa", 4),
        ("hca", 128),
        ("csa", 4),
    ]
    layers = tuple(LayerSpec(kind, ratio, index < 1) for index, (kind, ratio) in enumerate(kinds))  # type: ignore[arg-type]
    return replace(
        preset("tiny"),
        **{"hidden_size": 256, "vocab_size": vocab_size, "layers": layers, "num_heads": 8, "head_dim": 128},
        **{"rope_dim": 64, "q_rank": 128, "o_groups": 2, "o_rank": 128, "window": 128, "index_heads": 8},
        **{"index_dim": 64, "index_topk": 64, "num_experts": 16, "experts_per_token": 4, "expert_width": 64},
        **{"max_positions": 16384, "yarn": Yarn(4.0, 4096, 32.0, 1.0)},
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
    corpus: Path, tokenizer: Path, seed: int, jobs: "mp.Queue[Phase | None]", out: "mp.Queue[object]"
) -> None:
    """One data process: packs rows of the current phase until told to stop."""
    from recipes.tiny.mix import Mix

    torch.set_num_threads(1)
    mix = Mix(corpus, Tokenizer.load(tokenizer), seed=seed, split="train")
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


def probe_rows(corpus: Path, tokenizer: Path, out: "mp.Queue[object]") -> None:
    from recipes.tiny.probe import recall_rows

    torch.set_num_threads(1)
    out.put(recall_rows(corpus, Tokenizer.load(tokenizer), PROBE_ROWS, MAX_LENGTH))


class Feeder:
    """Rows from several data processes; rows of an earlier phase are thrown away."""

    def __init__(self, corpus: Path, tokenizer: Path, seed: int, workers: int) -> None:
        context = mp.get_context("spawn")
        self.out = context.Queue(maxsize=256)
        self.jobs = [context.Queue() for _ in range(workers)]
        self.processes = [
            context.Process(
                target=feed, args=(corpus, tokenizer, seed * 1000 + i, jobs, self.out), daemon=True
            )
            for i, jobs in enumerate(self.jobs)
        ]
        self.probe = context.Queue()
        self.processes.append(
            context.Process(target=probe_rows, args=(corpus, tokenizer, self.probe), daemon=True)
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
            a, b, c = (torch.from_numpy(t).pin_memory().to(device, non_blocking=True) for t in columns)
            yield a, b, c

    def close(self) -> None:
        for process in self.processes:
            process.terminate()


def losses(
    twin: Twin, ids: Tensor, mask: Tensor, of: Tensor
) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
    """ids, mask (tokens to be predicted), of (their documents) [B, L] -> the loss, its parts, loads."""
    notes = Notes()
    twin = replace(twin, documents=of, notes=notes)
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


def train(twin: Twin, feeder: Feeder, phases: list[Phase], out: Path, device: str, seconds: float) -> None:
    """The schedule follows the clock, from the end of the first step on: that one waits for data."""
    optimiser = Optimiser(twin)
    before, step, tokens, edge = 0.0, 0, 0, 0.0
    if (out / "last.pt").exists():
        saved = torch.load(out / "last.pt", map_location=device, weights_only=True)
        twin.restore(saved["twin"])
        optimiser.load_state_dict(saved["optimiser"])
        before, step, tokens = saved["seconds"], saved["step"], saved["tokens"]
    start: float | None = None
    elapsed, probe = before, []
    with (out / "log.jsonl").open("a") as log:
        for phase in phases:
            edge += phase.share * seconds
            twin = twin.rounds(phase.rounds_cache, phase.rounds_weights, torch.bfloat16)
            batches = feeder.batches(phase, device)
            while elapsed < edge:
                ids, mask, of = next(batches)
                loss, parts, loads = losses(twin, ids, mask, of)
                loss.backward()
                optimiser.step(rate(elapsed / seconds))
                balance(twin, loads)
                step, tokens = step + 1, tokens + ids.numel()
                if start is None:
                    torch.cuda.synchronize()
                    start = time.perf_counter()
                elapsed = before + time.perf_counter() - start
                if step % 20 == 0:
                    row = {"step": step, "phase": phase.name, "seconds": round(elapsed, 1), "tokens": tokens}
                    row |= {name: round(float(value.detach()), 4) for name, value in parts.items()}
                    row |= {"max_load": round(max(float(load.max()) for load in loads.values()), 3)}
                    log.write(json.dumps(row) + "\n")
                    log.flush()
                if step % 500 == 0:
                    probe = probe or [torch.from_numpy(t).to(device) for t in feeder.probe.get(timeout=300)]
                    row = {"step": step, "recall": round(recall_rate(twin, *probe), 3)}
                    log.write(json.dumps(row) + "\n")
                    _save(twin, optimiser, out, step, tokens, elapsed)
    _save(twin, optimiser, out, step, tokens, elapsed)


def _save(twin: Twin, optimiser: Optimiser, out: Path, step: int, tokens: int, seconds: float) -> None:
    state = {"twin": dict(twin.tensors), "optimiser": optimiser.state_dict()}
    torch.save(state | {"step": step, "tokens": tokens, "seconds": seconds}, out / "last.tmp")
    (out / "last.tmp").replace(out / "last.pt")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=840, help="training time after the first step")
    parser.add_argument("--rows", default="128,32,32", help="rows per step of each phase")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=13)
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    rows = [int(n) for n in args.rows.split(",")]
    phases = [
        Phase("main", 0.55, rows[0], 1024, False, False),
        Phase("long", 0.33, rows[1], MAX_LENGTH, True, False),
        Phase("final", 0.12, rows[2], MAX_LENGTH, True, True),
    ]
    feeder = Feeder(args.corpus, args.tokenizer, args.seed, args.workers)
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    config = model_config(Tokenizer.load(args.tokenizer).vocab_size)
    ops = importlib.import_module("recipes.tiny.fused") if args.device.startswith("cuda") else plain
    twin = Twin.make(config, args.device, ops)
    initialise(twin, args.seed)
    try:
        train(twin, feeder, phases, args.out, args.device, args.seconds)
    finally:
        feeder.close()


if __name__ == "__main__":
    main()
