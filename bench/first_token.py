"""Milliseconds from a request to its first token, over the prompt's length, through `Engine.step`.

    python -m bench.first_token --experts 192
    python -m bench.first_token --turns 64@131072 --max-context 139264 --stall > line
    python -m bench.first_token --draw line docs/first_token.png

V4-Flash's sizes, random weights, greedy, one request at a time, the best of `--rounds`. `--turns` adds
prompts after a context that is in the cache already: `64@131072` is a chat turn of 64 tokens. `--stall`
measures streams beside prompts in the same engine (stall.py). The last line is JSON, and can be drawn.
"""

import argparse
import gc
import json
import random
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from bench import beside
from bench.stall import measure, say
from bench.sweep import BLUE, short
from dsv4 import Engine, EngineConfig, SamplingParams
from dsv4.config import ModelConfig
from dsv4.lab.bench.engine import around
from dsv4.lab.bench.subject import synthetic
from dsv4.lab.draw import INK, PALE, blank, check, save, strip
from dsv4.model.bundle import Bundle

# With weights unpacked to BF16 for every step, 15 November 2026.
BEFORE = {16: 414, 64: 535, 256: 581, 1024: 617, 4096: 853, 8192: 1178}
ROUNDS = 5  # beside Transformers


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


def engine_of(bundle: Bundle, args: argparse.Namespace) -> Engine:
    return around(
        bundle,
        EngineConfig(
            device="cuda",
            max_batch=8 if args.stall else 1,
            max_context=args.max_context,
            prefix_snapshots=args.snapshots,
            chunk=args.chunk,
        ),
    )


def beside_transformers(args: argparse.Namespace, began: float) -> dict[str, Any]:
    """Four layers of every kind, as `python -m bench.beside` has them."""
    device, lengths = torch.device("cuda:0"), (64, 1024)
    subject = synthetic("flash", beside.EXPERTS, beside.LAYERS, "modelopt")
    reader = Reader(engine_of(subject.bundle(device), args))
    ours = {length: reader.best(length, 0, ROUNDS)["ms"] for length in lengths}
    say(f"ours {ours}", began)
    del reader
    gc.collect()
    torch.cuda.empty_cache()
    beside.check(max(lengths))
    theirs = their_ms(subject.config, lengths, device)
    say(f"theirs {theirs}", began)
    return {"ours_ms": ours, "theirs_ms": theirs, "version": beside.version("transformers")}


def their_ms(config: ModelConfig, lengths: Sequence[int], device: torch.device) -> dict[int, float]:
    """Milliseconds of a prompt of each length up to its first token, the best of ROUNDS."""
    model, out = beside.make(config, device), {}
    with torch.inference_mode():
        for length in lengths:
            times = []
            for _ in range(1 + ROUNDS):
                ids = torch.randint(0, config.vocab_size, (1, length), device=device)
                int(ids[0, 0])  # waited for
                start = time.perf_counter()
                int(model(ids, use_cache=True, logits_to_keep=1).logits[0, -1].argmax())
                times.append(1e3 * (time.perf_counter() - start))
            out[length] = round(min(times[1:]), 2)
    return out


def draw_first_tokens(
    path: Path, before: Mapping[int, float], after: Mapping[int, float], title: str, subtitle: str
) -> None:
    """Milliseconds to the first token by the prompt's length."""
    check(path)
    figure = blank(7.2, 4.2)
    axes = figure.add_subplot()
    for points, name, colour, above in ((before, "before", PALE, True), (after, "now", BLUE, False)):
        x, y = sorted(points), [points[length] for length in sorted(points)]
        axes.plot(x, y, color=colour, marker="o", markersize=5, linewidth=1.8, clip_on=False, zorder=3)
        for length, ms in zip(x, y, strict=True):
            axes.annotate(
                *(f"{ms:,.0f}", (length, ms)),
                **{"xytext": (0, 8 if above else -14), "textcoords": "offset points", "ha": "center"},
                **{"color": colour, "fontsize": 8},
            )
        axes.annotate(
            *(name, (x[-1], y[-1])),
            **{"xytext": (10, 0), "textcoords": "offset points", "ha": "left", "va": "center"},
            **{"color": colour, "fontsize": 9.5},
        )
    every = sorted({*before, *after})
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(every, [short(length) for length in every])
    axes.set_yticks([10, 30, 100, 300, 1000, 3000], ["10", "30", "100", "300", "1,000", "3,000"])
    axes.set_ylim(14, 1.3 * max(*before.values(), *after.values()))
    strip(axes)
    axes.set_xlabel("tokens of the prompt", color=INK, fontsize=9.5, labelpad=8)
    axes.set_ylabel("milliseconds to the first token", color=INK, fontsize=9.5)
    figure.text(0.01, 1.07, title, color=INK, fontsize=12, weight="bold", va="bottom")
    figure.text(0.01, 1.02, subtitle, color=PALE, fontsize=8.5, va="bottom")
    save(figure, path)


def draw(line: Path, picture: Path) -> None:
    found = json.loads(line.read_text().splitlines()[-1])
    after = {one["tokens"]: one["ms"] for one in found["first_tokens"] if not one["context"]}
    draw_first_tokens(
        picture,
        {length: ms for length, ms in BEFORE.items() if length in after},
        after,
        "First token of V4-Flash's sizes",
        f"{found['device']}, {found['layout']}, {found['experts']} experts, 43 layers, through Engine.step",
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--experts", type=int, default=192)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--layout", default="nvfp4")
    parser.add_argument("--tokens", default="16,64,256,1024,4096,8192")
    parser.add_argument("--turns", default="", help="tokens@context, with commas")
    parser.add_argument("--max-context", type=int, default=16384)
    parser.add_argument("--snapshots", type=int, default=8)
    parser.add_argument("--chunk", type=int)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--stall", action="store_true")
    parser.add_argument("--beside-transformers", action="store_true")
    parser.add_argument("--draw", nargs=2, type=Path, metavar=("LINE", "PICTURE"))
    args = parser.parse_args()
    if args.draw:
        return draw(*args.draw)
    began = time.perf_counter()
    out: dict[str, Any] = {"device": torch.cuda.get_device_name(), "experts": args.experts}
    if args.beside_transformers:
        out["beside_transformers"] = beside_transformers(args, began)
    bundle = synthetic("flash", args.experts, args.layers, args.layout).bundle(torch.device("cuda:0"))
    torch.cuda.synchronize()
    say("weights are made", began)
    held = torch.cuda.memory_allocated()
    reader = Reader(engine_of(bundle, args))
    say(f"the engine is ready, {(torch.cuda.memory_allocated() - held) / 1e9:.2f} GB beside weights", began)
    out |= {"layout": args.layout, "first_tokens": []}

    def read(wanted: list[tuple[int, int]]) -> None:
        for tokens, context in wanted:
            held = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            found = reader.best(tokens, context, args.rounds)
            found["step_gb"] = round((torch.cuda.max_memory_allocated() - held) / 1e9, 3)
            say(json.dumps(found), began)
            out["first_tokens"].append(found)

    read([(int(tokens), 0) for tokens in args.tokens.split(",") if tokens])
    if args.stall:
        out["stall"] = measure(
            reader.engine, num_streams=7, prompt_tokens=4000, prompts=6, warm=2, began=began
        )
        say(json.dumps(out["stall"]), began)
    turns = [turn.split("@") for turn in args.turns.split(",") if turn]
    read([(int(tokens), int(context)) for tokens, context in turns])
    print(json.dumps(out))


if __name__ == "__main__":
    main()
