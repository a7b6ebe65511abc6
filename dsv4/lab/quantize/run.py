"""Converts a checkpoint: opens and plans, checks what could go wrong, then writes shard after shard."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from dsv4.device import one_thread, usable_cores
from dsv4.errors import CheckpointError, ConfigError
from dsv4.lab.files import size
from dsv4.lab.quantize.convert import Converter, Task, Write
from dsv4.lab.quantize.headers import quantization
from dsv4.lab.quantize.job import RECORD, WORK, Job, Part, examine
from dsv4.lab.quantize.plan import Item, Options, Plan, Shard, Unit, make_plan
from dsv4.lab.quantize.report import make_report, record
from dsv4.quant.bulk import Tally
from dsv4.weights.load import Checkpoint
from dsv4.weights.reader import INDEX
from dsv4.weights.writer import index_text

# Raised when the same options would write other bytes than before.
_VERSION = 1
# Source bytes whose scans are done before their conversion begins: they are still in the page cache then.
WAVE_BYTES = 256 << 20
# A thread needs up to 25 MB; more of them than this would wait for the disk.
MAX_THREADS = 32
# A file of the source folder larger than this is not one of its small files.
SMALL_BYTES = 64 << 20
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".onnx", ".h5", ".msgpack")
_REWRITTEN = ("config.json", "hf_quant_config.json", RECORD)
# Tensors that an inexact cast names before it stops looking.
_NAMED = 5

Progress = Callable[[int, int], None]  # source bytes done, source bytes in all


@dataclass(frozen=True)
class Quantizer:
    """A planned conversion: `check` it, then `write` it."""

    checkpoint: Checkpoint
    plan: Plan
    folder: Path
    copies: dict[str, Path]  # name in the target -> small file of the source
    fingerprint: str
    threads: int

    @classmethod
    def prepare(
        cls, source: str | Path, folder: str | Path, options: Options, threads: int | None = None
    ) -> "Quantizer":
        """Open and plan; refuses what the arguments and the source's headers rule out."""
        source, folder = Path(source), Path(folder)
        cores = usable_cores()
        if threads is not None and not 1 <= threads <= MAX_THREADS:
            raise ConfigError(
                f"threads is {threads}, expected 1 to {MAX_THREADS}; more would wait for the disk"
            )
        home = source.parent if source.is_file() else source
        if home.exists():
            here, there = home.resolve(), folder.resolve()
            if here == there:
                raise ConfigError(f"{folder} is the source itself; give a new folder")
            if here in there.parents or there in here.parents:
                raise ConfigError(f"{folder} and {source} lie inside each other; give a folder elsewhere")
        checkpoint = Checkpoint.open(source)
        copies, left_out = _small_files(home, {entry.file for entry in checkpoint.reader.entries.values()})
        plan = make_plan(checkpoint, options)
        if left_out:
            note = f"not copied, as they are no small files: {', '.join(left_out)}"
            plan = replace(plan, notes=(*plan.notes, note))
        fingerprint = _fingerprint(checkpoint, options)
        return cls(checkpoint, plan, folder, copies, fingerprint, threads or min(cores, MAX_THREADS))

    def check(self, progress: Progress | None = None) -> None:
        """Refuse what the target folder, its disk or an inexact cast rule out. Writes nothing."""
        state = examine(self.folder, self.fingerprint)
        if state == "done":
            return
        self._check_disk()
        if state == "new" and self.plan.options.recipe == "cast":
            with self._tools() as (converter, pool):
                _refuse_inexact(self.plan, converter, pool, progress)

    def write(self, progress: Progress | None = None) -> tuple[dict[str, Any], bool]:
        """Write the target, or what is left of it. -> the report, and whether there was anything to do."""
        if examine(self.folder, self.fingerprint) == "done":
            return self._old_report(), False
        with self._tools() as (converter, pool), Job(self.folder, self.fingerprint) as job:
            if examine(self.folder, self.fingerprint) == "done":
                # Another run finished it between our look and our lock.
                return self._old_report(), False
            records = self._write_shards(job, converter, pool, progress)
            report = make_report(self.plan, records, self.checkpoint.reader.folder.resolve().name)
            self._complete(job, report)
        return report, True

    def _old_report(self) -> dict[str, Any]:
        """Of a finished run, after a look at whether its files are still there."""
        for shard in self.plan.shards:
            path = self.folder / shard.name
            if not path.is_file() or path.stat().st_size != shard.num_bytes:
                raise ConfigError(
                    f"{path} is missing or of another size than when it was finished; "
                    "remove the folder and run the command again"
                )
        shutil.rmtree(self.folder / WORK, ignore_errors=True)
        return json.loads((self.folder / RECORD).read_bytes())["report"]

    @contextmanager
    def _tools(self) -> Iterator[tuple[Converter, "_Pool"]]:
        with self.checkpoint.reader as reader, one_thread(), _Pool(self.threads) as pool:
            yield Converter(reader, self.plan.options.least_squares), pool

    def _check_disk(self) -> None:
        present = {path.name: path.stat().st_size for path in _files(self.folder)}
        wanted = sum(shard.num_bytes for shard in self.plan.shards if shard.name not in present)
        wanted += sum(path.stat().st_size for path in self.copies.values())
        parts = sum(path.stat().st_size for path in _files(self.folder / WORK))
        place = next(path for path in (self.folder, *self.folder.absolute().parents) if path.exists())
        free = shutil.disk_usage(place).free + parts
        if wanted > free:
            raise ConfigError(
                f"{self.folder} needs {size(wanted)}, but {size(free)} of disk are free; "
                "make room or give a folder on another disk"
            )

    def _write_shards(
        self, job: Job, converter: Converter, pool: "_Pool", progress: Progress | None
    ) -> list[Any]:
        records: list[Any] = []
        finished = set(job.finished())
        complete = {shard.name for shard in self.plan.shards if self._is_complete(job, shard, finished)}
        total = sum(shard.source_bytes for shard in self.plan.shards if shard.name not in complete)
        done = 0
        for shard in self.plan.shards:
            if shard.name in complete:
                records += job.statistics(shard.name)
                continue
            header = shard.header
            part = Part(job, shard.name, shard.num_bytes)
            try:
                part.write(0, header)
                tallies: dict[str, Tally] = {}
                for task, tally in _convert(shard, converter, pool, part.write, shard.offsets(len(header))):
                    tallies.setdefault(task.item.name, Tally()).add(tally)
                    done += task.num_bytes
                    if progress:
                        progress(min(done, total), total)
                outcome = [
                    record(item, tallies.get(item.name)) for unit in shard.units for item in unit.items
                ]
                part.finish(outcome)
            finally:
                pool.drain()
                part.file.close()
            records += outcome
        return records

    def _is_complete(self, job: Job, shard: Shard, finished: set[str]) -> bool:
        if shard.name not in finished:
            return False
        path, header = job.folder / shard.name, shard.header
        with path.open("rb") as file:
            return path.stat().st_size == shard.num_bytes and file.read(len(header)) == header

    def _complete(self, job: Job, report: dict[str, Any]) -> None:
        for name, path in self.copies.items():
            try:
                content = path.read_bytes()
            except OSError as error:
                raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from None
            job.put(name, content)
        small = {}
        if len(self.plan.shards) > 1:
            index = {tensor.name: shard.name for shard in self.plan.shards for tensor in shard.tensors}
            small[INDEX] = index_text(index, self.plan.num_bytes).encode()
        before = json.loads((self.checkpoint.reader.folder / "config.json").read_bytes())
        config, extra = quantization(self.plan.items, before)
        if extra:
            small["hf_quant_config.json"] = (json.dumps(extra, indent=1) + "\n").encode()
        job.complete({"report": report}, small, (json.dumps(config, indent=1) + "\n").encode())


class _Pool:
    """Threads that run many small tasks, one list after the other; results come in order."""

    def __init__(self, threads: int) -> None:
        self._executor = ThreadPoolExecutor(threads)
        self._futures: list[Future[Any]] = []

    def __enter__(self) -> "_Pool":
        return self

    def __exit__(self, *error: object) -> None:
        self.drain()
        self._executor.shutdown()

    def run(self, calls: list[Callable[[], Any]]) -> Iterator[Any]:
        self._futures = [self._executor.submit(call) for call in calls]
        return (future.result() for future in self._futures)

    def drain(self) -> None:
        """Drop what has not begun and wait for the rest: after an error, nobody may still be writing."""
        for future in self._futures:
            future.cancel()
        wait(self._futures)


def _scanned(
    units: tuple[Unit, ...], converter: Converter, pool: _Pool
) -> Iterator[list[tuple[Unit, list[Any]]]]:
    """Units with what their scans found, a wave at a time."""
    wave: list[Unit] = []
    size = 0
    for index, unit in enumerate(units):
        wave.append(unit)
        size += unit.source_bytes
        if index + 1 < len(units) and size + units[index + 1].source_bytes <= WAVE_BYTES:
            continue
        scans = [converter.scans(unit) for unit in wave]
        found = pool.run([scan for of_unit in scans for scan in of_unit])
        yield [(unit, [next(found) for _ in of_unit]) for unit, of_unit in zip(wave, scans, strict=True)]
        wave, size = [], 0


def _convert(
    shard: Shard, converter: Converter, pool: _Pool, write: Write, offsets: dict[str, int]
) -> Iterator[tuple[Task, Tally]]:
    for wave in _scanned(shard.units, converter, pool):
        tasks = [task for unit, scan in wave for task in converter.tasks(unit, scan, write, offsets)]
        yield from zip(tasks, pool.run([task.run for task in tasks]), strict=True)


def _refuse_inexact(plan: Plan, converter: Converter, pool: _Pool, progress: Progress | None) -> None:
    found: dict[str, Item] = {}
    for item in _inexact(plan, converter, pool, progress):
        found[item.name] = item
        if len(found) > _NAMED:
            break
    if found:
        names = ", ".join(list(found)[:_NAMED]) + (" and more" if len(found) > _NAMED else "")
        first = next(iter(found.values()))
        raise ConfigError(
            f"a cast to {first.format} would not be exact for {names} (stored as {first.stored}); "
            "use --recipe requant, which rounds, or auto, which casts what it can and rounds the rest"
        )


def _inexact(plan: Plan, converter: Converter, pool: _Pool, progress: Progress | None) -> Iterator[Item]:
    """Parameters that would lose something: the whole conversion, without writing."""
    units = tuple(unit for shard in plan.shards for unit in shard.units if unit.how != "keep")
    total, done = sum(unit.source_bytes for unit in units), 0
    offsets = {tensor.name: 0 for shard in plan.shards for tensor in shard.tensors}
    for wave in _scanned(units, converter, pool):
        tasks: list[Task] = []
        for unit, scan in wave:
            if unit.how == "cast" and scan[0].is_exact:
                done += unit.source_bytes
            else:
                tasks += converter.tasks(unit, scan, _discard, offsets)
        for task, tally in zip(tasks, pool.run([task.run for task in tasks]), strict=True):
            done += task.num_bytes
            if tally.inexact:
                yield task.item
        if progress:
            progress(min(done, total), total)


def _discard(offset: int, content: Any) -> None:
    """Where a trial conversion writes to."""


def _files(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.is_file()] if folder.is_dir() else []


def _fingerprint(checkpoint: Checkpoint, options: Options) -> str:
    """Of the source's files and the options: an interrupted run may only be continued by its like."""
    digest = hashlib.sha256(json.dumps([_VERSION, asdict(options)]).encode())
    reader = checkpoint.reader
    try:
        for file in sorted({entry.file for entry in reader.entries.values()}):
            status = file.stat()
            digest.update(f"{file.name} {status.st_size} {status.st_mtime_ns}\n".encode())
        digest.update((reader.folder / "config.json").read_bytes())
    except OSError as error:
        raise CheckpointError(f"{error.filename} cannot be read: {error.strerror or error}") from None
    for entry in reader.entries.values():
        digest.update(f"{entry.name} {entry.dtype} {entry.shape} {entry.start}\n".encode())
    return digest.hexdigest()


def _small_files(home: Path, shards: set[Path]) -> tuple[dict[str, Path], list[str]]:
    """Tokenizer, licence, code: what belongs to the model but is no weight. -> those, and names left out."""
    out: dict[str, Path] = {}
    left_out = []
    for root, folders, files in os.walk(home):
        folders[:] = sorted(name for name in folders if not name.startswith((".", "__pycache__")))
        for file in sorted(files):
            path = Path(root) / file
            name = str(path.relative_to(home))
            if file.startswith(".") or name in _REWRITTEN or file == INDEX or path in shards:
                continue
            if file.endswith(_WEIGHTS) or not path.is_file() or path.stat().st_size > SMALL_BYTES:
                left_out.append(name)
            else:
                out[name] = path
    return out, left_out
