"""Decode steps of this checkout and of another, in turns on the same GPU: two H200s differ by 4 %.

    python -m bench.decode_ab ../before --batch 1 8 32 --layout nvfp4 --turns 2

Each turn is a `dsv4 bench decode --synthetic flash` of its own in each folder. Prints milliseconds per step.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median

HERE = Path(__file__).parents[1]


def step_ms(folder: Path, options: list[str]) -> float:
    command = [sys.executable, "-m", "dsv4", "bench", "decode", "--synthetic", "flash", *options]
    paths = {"PYTHONPATH": str(folder), "XDG_CACHE_HOME": str(folder / "build" / "cache")}
    done = subprocess.run(command, cwd=folder, env=os.environ | paths, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{folder}: {' '.join(command)} failed:\n{done.stderr[-2000:]}")
    return float(json.loads(done.stdout.splitlines()[-1])["ms_per_token"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("other", type=Path, help="folder of the other checkout")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--layout", nargs="+", default=["nvfp4"])
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=48)
    parser.add_argument("--turns", type=int, default=1)
    args = parser.parse_args()
    print(f"{'layout':10} {'batch':>5} {'other ms':>9} {'this ms':>9} {'this / other':>12}", flush=True)
    for layout in args.layout:
        for batch in args.batch:
            options = ["--layout", layout, "--batch", str(batch), "--context", str(args.context)]
            options += ["--steps", str(args.steps)]
            times: dict[Path, list[float]] = {args.other.resolve(): [], HERE: []}
            for _ in range(args.turns):
                for folder, found in times.items():
                    found.append(step_ms(folder, options))
            other, this = (median(found) for found in times.values())
            print(f"{layout:10} {batch:5} {other:9.3f} {this:9.3f} {this / other:12.3f}", flush=True)


if __name__ == "__main__":
    main()
