"""Speed of `dsv4 quantize` against copying on the same disk, and of rounding from BF16; peak memory of both.

    python -m bench.quantize --folder build/bench        # 5 GB; needs 16 GB of disk and cleans up

Random checkpoints with V4-Pro's widths. Every timed step starts with its source out of the page cache and
ends with its result on disk; the command is timed as a user runs it, start of Python included.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dsv4.config import LayerSpec, ModelConfig, preset
from dsv4.lab.quantize.plan import official_format
from dsv4.model.params import declare
from dsv4.quant.formats import Format
from dsv4.weights.names import has_weight_suffix
from dsv4.weights.reader import DTYPES, torch_type
from dsv4.weights.writer import Declared, declare_linear, write_checkpoint

ROOT = Path(__file__).parents[1]


def make(folder: Path, config: ModelConfig, is_official: bool) -> int:
    """A checkpoint of random bytes, far faster made than `dsv4 init` could; returns its size."""
    tensors: list[Declared] = []
    for param in declare(config, 0):
        name = f"{param.name}.weight" if has_weight_suffix(param.name) else param.name
        if param.kind in ("linear", "grouped"):
            format = official_format(param) if is_official else Format.BF16
            tensors += declare_linear(param.name, (param.shape[0], param.shape[1]), format)
        else:
            tensors.append(Declared(name, "I64" if param.kind == "table" else "F32", param.shape))

    def values() -> Iterator[torch.Tensor]:
        random = np.random.default_rng(0)
        for tensor in tensors:
            count = int(np.prod(tensor.shape))
            if tensor.dtype == "BF16":
                yield torch.randn(tensor.shape).mul_(0.02).to(torch.bfloat16)
            elif tensor.dtype == "F8_E8M0":
                yield torch.from_numpy(random.integers(112, 120, tensor.shape, dtype=np.uint8))
            elif DTYPES[tensor.dtype][0] == 1:
                # Without the bit that all E4M3 NaNs have.
                codes = np.frombuffer(random.bytes(count), np.uint8) & 0xF7
                yield torch.from_numpy(codes).reshape(tensor.shape)
            else:
                yield torch.zeros(tensor.shape, dtype=torch_type(tensor.dtype))

    folder.mkdir(parents=True)
    for _ in write_checkpoint(folder, tensors, values(), limit=10**12):
        pass
    (folder / "config.json").write_text(json.dumps(config.to_dict()))
    return sum(tensor.num_bytes for tensor in tensors)


# The program, and its peak memory at the end. (Not getrusage of children: that begins with the parent's own.)
RUN = """
import atexit, sys
from dsv4.cli.main import main
atexit.register(lambda: sys.stderr.write(open("/proc/self/status").read()))
main()
"""


@dataclass(frozen=True)
class Run:
    seconds: float
    cpu_seconds: float  # of all threads: on a busy machine the better measure
    components: list[dict[str, Any]]
    peak_gib: float


def forget(path: Path) -> None:
    """Out of the page cache."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def copy(source: Path, target: Path) -> float:
    forget(source)
    start = time.perf_counter()
    shutil.copyfile(source, target)
    with target.open("rb") as file:
        os.fsync(file.fileno())
    seconds = time.perf_counter() - start
    target.unlink()
    return seconds


def quantize(source: Path, target: Path, *options: str) -> Run:
    forget(source / "model.safetensors")
    command = [sys.executable, "-c", RUN, "quantize", str(source), str(target), *options, "--json"]
    start, before = time.perf_counter(), os.times()
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    seconds, after = time.perf_counter() - start, os.times()
    shutil.rmtree(target)
    cpu = sum(getattr(after, name) - getattr(before, name) for name in ("children_user", "children_system"))
    peak = int(done.stderr.split("VmHWM:")[1].split()[0]) / 2**20
    return Run(seconds, cpu, json.loads(done.stdout)["components"], peak)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "bench")
    parser.add_argument("--gigabytes", type=float, default=5.0)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    need = 3.2 * given.gigabytes * 1e9
    if shutil.disk_usage(given.folder).free < need:
        sys.exit(f"{given.folder} needs {need / 1e9:.0f} GB of free disk")
    work = given.folder / f"quantize-{os.getpid()}"
    threads = ("--threads", str(given.threads))
    try:
        small = replace(
            preset("pro"), vocab_size=1024, num_mtp_layers=0, layers=(LayerSpec("csa", 4, False),)
        )
        experts = max(8, round((given.gigabytes * 1e9 - 0.45e9) / 35_094_528))
        size = make(work / "official", replace(small, num_experts=experts), is_official=True)
        print(f"official checkpoint: {size / 1e9:.2f} GB, {experts} experts of V4-Pro's width")
        runs, ratios = [], []
        for _ in range(given.rounds):
            copied = copy(work / "official" / "model.safetensors", work / "copy")
            runs.append(quantize(work / "official", work / "new", "--format", "nvfp4", *threads))
            assert all(row["how"] in ("kept", "exact") for row in runs[-1].components)
            cast = runs[-1].seconds
            ratios.append(copied / cast)
            print(
                f"copy {copied:6.1f} s, {size / copied / 1e6:4.0f} MB/s   "
                f"exact cast {cast:6.1f} s, {size / cast / 1e6:4.0f} MB/s "
                f"({runs[-1].cpu_seconds:.1f} s of CPU)   ratio {ratios[-1]:.2f}"
            )
        shutil.rmtree(work / "official")
        few = replace(small, num_experts=max(8, round(given.gigabytes * 2)))
        size = make(work / "bf16", few, is_official=False)
        speeds = []
        for options in ((), ("--least-squares",)):
            all_linears = ("--format", "nvfp4", "--scope", "all", *threads, *options)
            runs.append(quantize(work / "bf16", work / "new", *all_linears))
            speeds.append(size / runs[-1].seconds / 1e6)
            what = " ".join(("rounding", *options))
            print(
                f"{what}: {size / 1e9:.2f} GB of BF16 in {runs[-1].seconds:.1f} s "
                f"({runs[-1].cpu_seconds:.1f} s of CPU), {speeds[-1]:.0f} MB/s of input"
            )
        peak = max(run.peak_gib for run in runs)
        result = {
            **{"cast_over_copy": ratios, "rounding_mb_per_s": speeds[0]},
            **{"least_squares_mb_per_s": speeds[1], "peak_gib": peak, "threads": given.threads},
        }
        print(json.dumps({key: np.round(value, 3).tolist() for key, value in result.items()}))
    finally:
        shutil.rmtree(work, ignore_errors=True)


if __name__ == "__main__":
    main()
