"""The training stream: records of every kind in their shares, packed into rows; and shards of it on disk.

python -m recipes.tiny.mix --corpus DIR --tokenizer FILE --out DIR --tokens N --seed S
"""

import argparse
import json
import multiprocessing
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random

import numpy as np

from dsv4.errors import ConfigError
from dsv4.text.tokenizer import Tokenizer
from recipes.tiny.corpus import read_corpus
from recipes.tiny.kinds import KINDS, PHASES, Record, make_record, plain_text, shares
from recipes.tiny.records import encode
from recipes.tiny.words import SPLITS, Split
from recipes.tiny.world import World

# A run of nine minutes on one GPU; how often the collection may repeat is judged against it.
TOTAL_TOKENS = 190_000_000
MAX_PASSES = 2.5  # of stories of children three times as many
POOL_SIZE = 32
# phase, row length, part of the tokens. Half of the main phase on short rows: more records with fewer tokens.
STAGES = (("main", 512, 0.35), ("main", 1024, 0.35), ("long", 4096, 0.20), ("final", 4096, 0.10))
SHARD_TOKENS = 1 << 22

Encoded = tuple[np.ndarray, np.ndarray]  # ids uint16 [T], is_target bool [T]


class Mix:
    """An endless stream of packed rows; the same arguments give the same rows."""

    def __init__(
        self,
        corpus: Path,
        tokenizer: Tokenizer,
        seed: int,
        split: Split = "train",
        total_tokens: int = TOTAL_TOKENS,
        max_passes: float = MAX_PASSES,
    ) -> None:
        if split not in SPLITS:
            raise ConfigError(f"split {split!r} is unknown; use one of {', '.join(SPLITS)}")
        self.world = build_world(corpus, tokenizer, split)
        self._tokenizer = tokenizer
        self._total_tokens, self._max_passes = total_tokens, max_passes
        self._plans: dict[tuple[str, int], _Plan] = {}
        self.restart(seed)

    def restart(self, seed: int) -> None:
        """As a new Mix with this seed, without reading the collection again."""
        self._rng = Random(f"dsv4 tiny {seed}")
        self._pools: dict[tuple[str, int], list[Encoded]] = {}

    def record(self, phase: str, length: int) -> Record:
        """One record of the phase, made for rows of this length."""
        plan = self._plan(phase, length)
        kind = self._rng.choices(plan.names, cum_weights=plan.weights)[0]
        return self._make(kind, self._rng, length)

    def shares(self, phase: str, length: int) -> dict[str, float]:
        """Each kind's part of the tokens."""
        return self._plan(phase, length).shares

    def next_batch(self, num_rows: int, length: int, phase: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """-> ids int32 [B, L], loss_mask bool [B, L], segments int16 [B, L].

        `loss_mask` marks the tokens to be predicted, at their own position. `segments` numbers the records of
        a row from 0. Rows hold whole records; only the last of a row may be cut.
        """
        ids = np.zeros((num_rows, length), dtype=np.int32)
        loss_mask = np.zeros((num_rows, length), dtype=bool)
        segments = np.zeros((num_rows, length), dtype=np.int16)
        for row in range(num_rows):
            at, segment = 0, 0
            while at < length:
                record_ids, is_target = self._next_fitting(phase, length, length - at)
                end = min(at + len(record_ids), length)
                ids[row, at:end] = record_ids[: end - at]
                loss_mask[row, at:end] = is_target[: end - at]
                segments[row, at:end] = segment
                at, segment = end, segment + 1
        return ids, loss_mask, segments

    def _next_fitting(self, phase: str, length: int, room: int) -> Encoded:
        """The oldest of the pool that fits, else the one with most to learn in its part that does."""
        pool = self._pools.setdefault((phase, length), [])
        while len(pool) < POOL_SIZE:
            pool.append(encode(self.record(phase, length), self._tokenizer))
        # A row begins with the oldest whatever its size, so that long records are not put off for ever.
        if room == length:
            return pool.pop(0)
        for index, (ids, _) in enumerate(pool):
            if len(ids) <= room:
                return pool.pop(index)
        return pool.pop(max(range(len(pool)), key=lambda index: int(pool[index][1][:room].sum())))

    def _make(self, kind: str, rng: Random, length: int) -> Record:
        if kind == "plain":
            return plain_text(self.world, rng, length)
        return make_record(KIND[kind], self.world, rng, length)

    def _plan(self, phase: str, length: int) -> "_Plan":
        """Chances of each kind, from its share and the mean size of its records, measured on a sample."""
        if phase not in PHASES:
            raise ConfigError(f"phase {phase!r} is unknown; use one of {', '.join(PHASES)}")
        if (phase, length) not in self._plans:
            rng = Random(f"sizes {length}")
            sizes: dict[str, float] = {}
            for name in (*KIND, "plain"):
                made = [encode(self._make(name, rng, length), self._tokenizer)[0] for _ in range(40)]
                sizes[name] = sum(min(len(ids), length) for ids in made) / len(made)
            parts = shares(phase, sizes, self.world, self._total_tokens, self._max_passes)
            names = [name for name in parts if parts[name] > 0]
            weights = np.cumsum([parts[name] / sizes[name] for name in names]).tolist()
            self._plans[phase, length] = _Plan(names, weights, parts, sizes)
        return self._plans[phase, length]


@dataclass(frozen=True)
class _Plan:
    names: list[str]
    weights: list[float]  # cumulative
    shares: dict[str, float]
    sizes: dict[str, float]


KIND = {kind.name: kind for kind in KINDS}


def build_world(folder: Path, tokenizer: Tokenizer, split: Split) -> World:
    """The words that may be asked for are counted in the training stories, whatever the split."""

    def count(text: str) -> int:
        return len(tokenizer.encode_text(text))

    train = World.build(read_corpus(folder, "train"), count)
    if split == "train":
        return train
    return World.build(read_corpus(folder, split), count, train)


@dataclass(frozen=True)
class Shard:
    """One file set `NAME.ids.npy` uint16, `NAME.mask.npy` bool, `NAME.segments.npy` int16, all [B, L]."""

    name: str
    phase: str
    length: int
    num_rows: int
    seed: int


def read_shard(folder: Path, shard: Shard) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """ids, loss_mask and segments, memory-mapped."""
    ids, mask, segments = (
        np.load(folder / f"{shard.name}.{part}.npy", mmap_mode="r") for part in ("ids", "mask", "segments")
    )
    return ids, mask, segments


def read_index(folder: Path) -> list[Shard]:
    """The shards of a folder in the order of training."""
    return [Shard(**entry) for entry in json.loads((folder / "index.json").read_text())["shards"]]


def plan_shards(num_tokens: int, seed: int) -> list[Shard]:
    """Shards of up to four million tokens; each has its own seed, whatever process makes it."""
    found: list[Shard] = []
    for phase, length, part in STAGES:
        left = max(round(num_tokens * part / length), 1)
        while left:
            num_rows = min(left, SHARD_TOKENS // length)
            found.append(
                Shard(
                    f"{len(found):05d}-{phase}-{length}", phase, length, num_rows, seed * 100_003 + len(found)
                )
            )
            left -= num_rows
    return found


_worker: dict[str, Mix] = {}


def _start_worker(corpus: Path, tokenizer: Path, total_tokens: int, max_passes: float) -> None:
    # One Mix for the life of the process: reading the collection takes seconds, restarting it nothing.
    _worker["mix"] = Mix(corpus, Tokenizer.load(tokenizer), 0, "train", total_tokens, max_passes)


def _write_shard(job: tuple[Path, Shard]) -> int:
    folder, shard = job
    mix = _worker["mix"]
    mix.restart(shard.seed)
    ids, mask, segments = mix.next_batch(shard.num_rows, shard.length, shard.phase)
    np.save(folder / f"{shard.name}.ids.npy", ids.astype(np.uint16))
    np.save(folder / f"{shard.name}.mask.npy", mask)
    np.save(folder / f"{shard.name}.segments.npy", segments)
    return ids.size


def main(arguments: list[str]) -> None:
    """Writes the shards of a whole run and says how fast."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--corpus", type=Path, required=True, help="folder with the collection's .jsonl.xz files"
    )
    parser.add_argument("--tokenizer", type=Path, required=True, help="tokenizer.json")
    parser.add_argument("--out", type=Path, required=True, help="folder for the shards")
    parser.add_argument("--tokens", type=int, required=True, help="of the whole run, all phases")
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--max-passes", type=float, default=MAX_PASSES, help="of the collection, at weight 1")
    parser.add_argument("--workers", type=int, default=multiprocessing.cpu_count())
    options = parser.parse_args(arguments)
    if options.tokens < 1 or options.workers < 1:
        raise ConfigError(f"--tokens {options.tokens}, --workers {options.workers}: both must be at least 1")
    options.out.mkdir(parents=True, exist_ok=True)
    shards = plan_shards(options.tokens, options.seed)
    start, done = time.perf_counter(), 0
    context = multiprocessing.get_context("spawn")
    setup = (options.corpus, options.tokenizer, options.tokens, options.max_passes)
    with context.Pool(min(options.workers, len(shards)), _start_worker, setup) as pool:
        for num_tokens in pool.imap_unordered(_write_shard, [(options.out, shard) for shard in shards]):
            done += num_tokens
            rate = done / (time.perf_counter() - start)
            sys.stdout.write(f"\r{done:,} tokens, {rate:,.0f} tokens/s on {options.workers} processes")
            sys.stdout.flush()
    index = {"seed": options.seed, "tokens": done, "shards": [asdict(shard) for shard in shards]}
    (options.out / "index.json").write_text(json.dumps(index, indent=1) + "\n")
    sys.stdout.write("\n")


if __name__ == "__main__":
    main(sys.argv[1:])
