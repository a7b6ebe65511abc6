"""Milliseconds from a request to its first token, over the prompt's length, through `Engine.step`.

    PYTHONPATH=. python tests/bench/first_token.py --experts 192
    PYTHONPATH=. python tests/bench/first_token.py --experts 192 --turns 64@131072 --stall

V4-Flash's sizes, random weights, greedy, one request at a time, the best of `--rounds`. `--turns` adds
prompts after a context that is in the cache already: `64@131072` is a chat turn of 64 tokens. `--stall`
measures streams beside prompts in the same engine (stall.py). The last line is JSON.
"""

import argparse
import json
import random
import time
from typing import Any

import torch
from stall import measure, say

from dsv4 import Engine, EngineConfig, SamplingParams
from dsv4.lab.bench.engine import around
from dsv4.lab.bench.subject import synthetic


class Reader:
    def __init__(self, engine: Engine) -> None:
        self.engine, self.chance = engine, random.Random(0)

    def ids(self, count: int) -> list[int]:
        return [self.chance.randrange(5, self.engine.model_config.vocab_size) for _ in range(count)]

    def read(self, ids: list[int]) -> tuple[float, list[float]]:
        """Milliseconds to the first token, and of each step."""
        request = self.engine.request(ids, SamplingParams(temperature=0, max_tokens=1, ignore_eos=True))
        torch.cuda.synchronize()
        began = time.perf_counter()
        self.engine.submit(request)
        steps: list[float] = []
        while True:
            start = time.perf_counter()
            deltas = self.engine.step()
            now = time.perf_counter()
            steps.append(round(1e3 * (now - start), 1))
            if deltas:
                return 1e3 * (now - began), steps

    def best(self, tokens: int, context: int, rounds: int) -> dict[str, Any]:
        """Each round reads other tokens, after the same context."""
        before = self.ids(context)
        if context:
            self.read([*before, 7])
        ms, steps = min(self.read(before + self.ids(tokens)) for _ in range(rounds))
        return {"tokens": tokens, "context": context, "ms": round(ms, 1), "steps": steps}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--experts", type=int, default=192)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--layout", default="nvfp4")
    parser.add_argument("--tokens", default="16,64,256,1024,4096,8192")
    parser.add_argument("--turns", default="", help="tokens@context, with commas")
    parser.add_argument("--max-context", type=int, default=16384)
    parser.add_argument("--snapshots", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--stall", action="store_true")
    args = parser.parse_args()
    began = time.perf_counter()
    bundle = synthetic("flash", args.experts, args.layers, args.layout).bundle(torch.device("cuda:0"))
    torch.cuda.synchronize()
    say("weights are made", began)
    config = EngineConfig(
        device="cuda",
        max_batch=8 if args.stall else 1,
        max_context=args.max_context,
        prefix_snapshots=args.snapshots,
    )
    reader = Reader(around(bundle, config))
    say("the engine is ready", began)
    wanted = [(int(tokens), 0) for tokens in args.tokens.split(",") if tokens]
    wanted += [(int(t), int(c)) for t, c in (turn.split("@") for turn in args.turns.split(",") if turn)]
    found = []
    for tokens, context in wanted:
        found.append(reader.best(tokens, context, args.rounds))
        say(json.dumps(found[-1]), began)
    out = {"experts": args.experts, "layout": args.layout, "first_tokens": found}
    if args.stall:
        out["stall"] = measure(reader.engine, 7, 4000, 6, 2, began)
    print(json.dumps(out))


if __name__ == "__main__":
    main()
