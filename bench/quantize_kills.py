"""Kills `dsv4 quantize` at random moments, restarts it, and holds the result against an undisturbed run.

    python -m bench.quantize_kills --kills 20                     # 200 MB of disk; a minute

Moments are spread over the whole run, from the lock to the last rename. A run that ends before its moment is
compared and begun again in a new folder. Prints one JSON line; exit code 1 if a byte differs.
"""

import argparse
import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from dsv4.config import preset
from dsv4.lab.init import make
from dsv4.lab.quantize.job import WORK

ROOT = Path(__file__).parents[1]


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def start(source: Path, target: Path, shard_gb: float) -> "subprocess.Popen[bytes]":
    options = ["--format", "nvfp4", "--scope", "all", "--mtp", "--shard-gb", str(shard_gb), "--threads", "2"]
    command = [sys.executable, "-m", "dsv4", "quantize", str(source), str(target), *options]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


def wait_for_lock(run: "subprocess.Popen[bytes]", target: Path, began: int) -> None:
    lock = target / WORK / "lock"
    while run.poll() is None:
        try:
            if lock.stat().st_mtime_ns >= began:
                return
        except FileNotFoundError:
            pass  # not there yet
        time.sleep(0.001)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=20261115)
    parser.add_argument("--shard-gb", type=float, default=0.001)
    given = parser.parse_args()
    chance = random.Random(given.seed)
    with tempfile.TemporaryDirectory(prefix="dsv4-kills-") as name:
        desk = Path(name)
        for _ in make(desk / "source", replace(preset("tiny"), num_experts=48), "bf16", seed=1):
            pass
        began = time.time_ns()
        whole = start(desk / "source", desk / "whole", given.shard_gb)
        wait_for_lock(whole, desk / "whole", began)
        at_work = time.perf_counter()
        assert whole.wait() == 0, whole.stderr and whole.stderr.read().decode()
        seconds = time.perf_counter() - at_work
        want = contents(desk / "whole")
        shards = sum(file.endswith(".safetensors") for file in want)
        print(f"{shards} shards, {sum(map(len, want.values())) / 1e6:.0f} MB, {seconds:.2f} s of work")
        kills = early = compared = 0
        found_shards: list[int] = []
        target = desk / "new"
        is_same = True
        while kills < given.kills:
            began = time.time_ns()
            run = start(desk / "source", target, given.shard_gb)
            wait_for_lock(run, target, began)
            try:
                run.wait(chance.random() * seconds)
            except subprocess.TimeoutExpired:
                run.kill()
                run.wait()
                kills += 1
                found_shards.append(len(list(target.glob("*.safetensors"))))
                continue
            assert run.returncode == 0, run.stderr and run.stderr.read().decode()
            early += 1
            compared, is_same = compared + 1, is_same and contents(target) == want
            shutil.rmtree(target)
        last = start(desk / "source", target, given.shard_gb)
        assert last.wait() == 0, last.stderr and last.stderr.read().decode()
        compared, is_same = compared + 1, is_same and contents(target) == want
        result = {"kills": kills, "results_compared": compared, "identical": is_same}
        print(json.dumps({**result, "ended_before_the_kill": early, "shards_at_kills": found_shards}))
        sys.exit(not is_same)


if __name__ == "__main__":
    main()
