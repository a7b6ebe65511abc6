"""Streams beside arriving prompts: time between tokens, and how fast the prompts are read meanwhile.

    python -m bench.stall                                       # the embedded model, CPU
    python -m bench.stall --synthetic flash --experts 192       # V4-Flash's sizes, GPU

Through `Engine.step`. Streams generate for as long as it takes; a prompt arrives, and as soon as it has its
first token, the next. The first ones are not counted: the engine learns its pace from them. The last line is
JSON: milliseconds between tokens (all, and of steps that read a prompt), tokens per second of the prompts.
What comes before it says how far this has come: V4-Flash's weights and kernels take a minute to be made.
"""

import argparse
import json
import random
import sys
import time
from typing import Any

from dsv4 import Engine, EngineConfig, SamplingParams

CONTEXT = 16384


def say(what: str, began: float) -> None:
    print(f"{time.perf_counter() - began:7.1f} s  {what}", file=sys.stderr, flush=True)


def engine_of(args: argparse.Namespace, config: EngineConfig, began: float) -> Engine:
    if args.synthetic is None:
        return Engine.load(args.model, config)
    import torch

    from dsv4.lab.bench.engine import around
    from dsv4.lab.bench.subject import synthetic

    bundle = synthetic(args.synthetic, args.experts, args.layers, args.layout).bundle(torch.device("cuda:0"))
    torch.cuda.synchronize()
    say("weights are made", began)
    return around(bundle, config)


def shown(gaps: list[float]) -> dict[str, float]:
    ordered = sorted(gaps)
    picks = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
    return {name: round(1000 * ordered[int(at * (len(ordered) - 1))], 2) for name, at in picks.items()}


def measure(
    engine: Engine, num_streams: int, prompt_tokens: int, prompts: int, warm: int, began: float
) -> dict[str, Any]:
    chance, vocab = random.Random(0), engine.model_config.vocab_size

    def ids(count: int) -> list[int]:
        return [chance.randrange(5, vocab) for _ in range(count)]

    def ask(count: int, max_tokens: int) -> str:
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        request = engine.request(ids(count), params)
        engine.submit(request)
        return request.id

    streams = {ask(64, CONTEXT // 2 - 64) for _ in range(num_streams)}
    last: dict[str, float] = {}
    while len(last) < num_streams:
        last |= {delta.request_id: time.perf_counter() for delta in engine.step()}
    alone = []
    for _ in range(30):
        start = time.perf_counter()
        engine.step()
        alone.append(time.perf_counter() - start)
    last = dict.fromkeys(streams, time.perf_counter())
    gaps, reading_gaps, chunks, seconds = [], [], [], []
    for number in range(warm + prompts):
        counts = number >= warm
        start, prompt, is_read = time.perf_counter(), ask(prompt_tokens, 1), False
        while not is_read:
            before = {s.number: s.num_processed for s in engine.scheduler.running}
            deltas = engine.step()
            now = time.perf_counter()
            readers = [s for s in engine.scheduler.running if s.request.id == prompt]
            chunks += [s.num_processed - before.get(s.number, 0) for s in readers if counts]
            for delta in deltas:
                is_read = is_read or delta.request_id == prompt
                if delta.request_id in streams:
                    reading_gaps += [now - last[delta.request_id]] if counts else []
                    last[delta.request_id] = now
        seconds += [time.perf_counter() - start] if counts else []
        say(f"prompt {number + 1} of {warm + prompts}: {time.perf_counter() - start:.3f} s", began)
        for _ in range(5):
            deltas = engine.step()
            now = time.perf_counter()
            for delta in deltas:
                gaps += [now - last[delta.request_id]] if counts else []
                last[delta.request_id] = now
    for id in streams:
        engine.cancel(id)
    return {
        "streams": num_streams,
        "prompt_tokens": prompt_tokens,
        "prompts": prompts,
        "decode_step_ms": shown(alone),
        "between_tokens_ms": shown(gaps + reading_gaps),
        "while_reading_ms": shown(reading_gaps),
        "prompt_tokens_per_second": round(prompt_tokens * len(seconds) / sum(seconds), 1),
        "chunk_tokens": {
            "least": min(chunks),
            "median": sorted(chunks)[len(chunks) // 2],
            "most": max(chunks),
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model")
    parser.add_argument("--synthetic")
    parser.add_argument("--experts", type=int)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--layout", default="nvfp4")
    parser.add_argument("--streams", type=int, default=7)
    parser.add_argument("--prompt", type=int, default=4000)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--warm", type=int, default=2)
    parser.add_argument("--max-stall-ms", type=int, default=100)
    args = parser.parse_args()
    began = time.perf_counter()
    engine = engine_of(
        args,
        EngineConfig(
            device="cuda" if args.synthetic else "cpu",
            max_batch=args.streams + 1,
            max_context=CONTEXT,
            max_stall_ms=args.max_stall_ms,
            prefix_snapshots=8,
        ),
        began,
    )
    say("the engine is ready", began)
    found = measure(
        engine,
        num_streams=args.streams,
        prompt_tokens=args.prompt,
        prompts=args.prompts,
        warm=args.warm,
        began=began,
    )
    print(json.dumps({"max_stall_ms": args.max_stall_ms, **found}))


if __name__ == "__main__":
    main()
