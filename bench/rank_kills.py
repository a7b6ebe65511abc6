"""Several ranks on this CPU at length: bits of 1, 2, 4 and 8, random arrivals, and kills under load.

    python -m bench.rank_kills --requests 200 --kills 10

Minutes. The last line is JSON.
"""

import argparse
import json
import os
import random
import signal
import tempfile
import threading
import time
from pathlib import Path

import torch

from dsv4 import SamplingParams
from dsv4.errors import DeviceError
from dsv4.lab.score import score_ids
from tests.parallel.ranks_support import SECONDS, engine_on, is_running, rank_pids, wait
from tests.parallel.test_shards import RANKS, WIDE
from tests.support.checkpoints import write_model
from tests.support.stress import cases, stress, truth

IDS = [(7 * i + i // 9) % WIDE.vocab_size for i in range(400)]


def same_bits(root: Path) -> int:
    """Every format on as many ranks as its scales allow -> comparisons."""
    compared = 0
    for style, most in RANKS.items():
        folder = write_model(root / style, style, WIDE)
        want: dict[str, torch.Tensor] = {}
        for ranks in (1, 2, 4, 8):
            if ranks > most:
                break
            with engine_on(folder, ranks) as engine:
                got = score_ids(engine, IDS, 360, mtp=bool(engine.model.mtp))
            want = want or got
            for name in want:
                assert torch.equal(got[name], want[name]), (style, ranks, name)
                compared += 1
            print(f"{style} on {ranks}: the same bits", flush=True)
    return compared


def arrivals(root: Path, requests: int) -> int:
    options = {"chunk": 96, "max_context": 1280, "prefix_snapshots": 6, "cache_pages": 7}
    folder = root / "bf16"
    with engine_on(folder, 1, **options) as alone:
        wanted = cases(20, WIDE.vocab_size, page=256)
        answers = truth(alone, wanted)
    compared = 0
    for ranks in (2, 4):
        with engine_on(folder, ranks, **options) as engine:
            compared += stress(engine, wanted, answers, requests)
    return compared


def kills(root: Path, count: int) -> float:
    """A rank of four is killed or stopped at a random moment -> the longest until the error, in seconds."""
    chance, longest = random.Random(0), 0.0
    for number in range(count):
        is_stopped = number % 3 == 2
        with engine_on(root / "bf16", 4, rank_seconds=3.0 if is_stopped else SECONDS) as engine:
            pids = rank_pids()
            which, moment = chance.randrange(3), chance.uniform(0, 1)
            when: list[float] = []

            def act(pid: int = pids[which], is_stopped: bool = is_stopped, when: list[float] = when) -> None:
                when.append(time.monotonic())
                os.kill(pid, signal.SIGSTOP if is_stopped else signal.SIGKILL)

            threading.Timer(moment, act).start()
            params = SamplingParams(max_tokens=400, ignore_eos=True)
            for start in range(3):
                engine.submit(engine.request([start, 2, 3], params))
            try:
                while engine.num_unfinished:
                    engine.step()
                raise AssertionError("nobody noticed")
            except DeviceError as error:
                took = time.monotonic() - when[0]
                assert f"rank {which + 1} " in str(error), error
                print(f"{took:.2f} s: {error}", flush=True)
                longest = max(longest, took - 3.0 * is_stopped)
            wait(lambda pids=pids: not any(map(is_running, pids)), 5)
    return longest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--kills", type=int, default=10)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        result = {
            "same_bits": same_bits(root),
            "arrivals": arrivals(root, arguments.requests),
            "longest_seconds_to_error": kills(root, arguments.kills),
        }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
