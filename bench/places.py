"""Any placement of experts, and experts that change places all the time: what everything resident gives, bit
for bit. Prompts, generated tokens, cancelled requests and paused ones, through the engine, on a GPU.

    python -m bench.places --steps 10000
"""

import argparse
import gc
import json
import random
import sys
import time
from dataclasses import replace
from typing import Any

import torch

from dsv4.config import EngineConfig, preset
from dsv4.engine import frequency, swap
from dsv4.engine.engine import Engine
from dsv4.engine.graphs import Graphs
from dsv4.engine.request import SamplingParams
from dsv4.engine.spill import Split
from dsv4.gpu.shapes import Form
from dsv4.lab.bench.engine import around
from dsv4.lab.bench.subject import Subject
from dsv4.lab.synthetic import with_experts
from dsv4.model import model, step
from dsv4.models import embedded
from dsv4.quant.formats import Format
from dsv4.weights.load import Checkpoint

SHORT = 16  # prompt steps of more tokens copy ahead: far fewer than usual, so that most do
CONTEXT, BATCH, CHUNK, EXPERTS = 1024, 4, 192, 16

Tokens = list[tuple[int, float | None]]


def swap_all_the_time() -> None:
    """Counts are looked at every other step, and any expert is worth a place."""
    frequency.EVERY = 2
    swap.MARGIN, swap.WORTH, swap.HALF_LIFE = -1.0, 0.0, 64
    model.READ_IN_PLACE = step.READ_IN_PLACE = SHORT


def traffic(engine: Engine, steps: int) -> tuple[dict[int, Tokens], dict[str, Any]]:
    """So many steps of requests of all lengths, every seventh cancelled somewhere -> the tokens of each."""
    chance, vocab = random.Random(1), engine.model_config.vocab_size
    tokens: dict[int, Tokens] = {}
    numbers: dict[str, int] = {}
    ended: set[str] = set()
    cancels: dict[int, list[str]] = {}
    memory: list[int] = []
    for now in range(steps):
        while engine.num_unfinished < BATCH + 2:
            length = chance.choice([1, 7, 40, 150, 500])
            ids = [chance.randrange(5, vocab) for _ in range(chance.randint(1, length))]
            params = SamplingParams(
                max_tokens=chance.randint(1, 300), temperature=0.0, logprobs=1, ignore_eos=True
            )
            request = engine.request(ids, params)
            number = numbers[request.id] = len(numbers)
            tokens[number] = []
            if number % 7 == 3:
                cancels.setdefault(now + chance.randrange(40), []).append(request.id)
            engine.submit(request)
        for late in cancels.pop(now, []):
            if late not in ended:
                engine.cancel(late)
        for delta in engine.step():
            assert delta.finish_reason != "error", delta.error
            if delta.finish_reason:
                ended.add(delta.request_id)
            if delta.token is not None:
                tokens[numbers[delta.request_id]].append((delta.token.id, delta.token.logprob))
        if now % (steps // 10) == 0:
            memory.append(torch.cuda.memory_allocated())
    executor = engine.runner.executor
    assert isinstance(executor, Graphs)
    swaps = 0 if executor.swapper is None else executor.swapper.num_swaps
    return tokens, {"swaps": swaps, "requests": len(tokens), "memory_grew": max(memory[3:]) - min(memory[3:])}


def differences(want: dict[int, Tokens], got: dict[int, Tokens]) -> tuple[int, int]:
    """Tokens compared, and those that differ: of each request what both have."""
    both = [(want[number], got[number]) for number in want.keys() & got.keys()]
    pairs = [pair for one, other in both for pair in zip(one, other, strict=False)]
    return len(pairs), sum(a != b for a, b in pairs)


def config_of(spill: str, share: float) -> EngineConfig:
    """Fewer pages than the sequences may need, so that some are paused."""
    return EngineConfig(
        device="cuda",
        max_context=CONTEXT,
        max_batch=BATCH,
        chunk=CHUNK,
        cache_pages=10,
        spill=spill,
        swap_share=share,
    )


def embedded_engine(place: str) -> Engine:
    experts = Checkpoint.open(embedded()).config.num_experts
    spill = {"everything": "off", "half": str(experts // 2), "nothing": str(experts)}[place]
    return Engine.load(None, config_of(spill, share=1.0))


def flash_engine(place: str) -> Engine:
    """A layer of every kind of Flash's, with few experts. A split says what is resident."""
    whole = preset("flash")
    kinds = {spec.kind: spec for spec in whole.layers}
    config = replace(with_experts(whole, EXPERTS), layers=tuple(kinds.values()))
    subject = Subject("flash", config, "official", 0, whole.num_layers, routing="zipf:0.5")
    names = tuple(f"layers.{layer}.ffn.experts" for layer in range(config.num_layers))
    total = config.num_layers * config.num_experts
    resident = {"everything": total, "half": total // 2, "nothing": 0}[place]
    split = Split(Form(Format.MXFP4, config.expert_width, config.hidden_size), names, EXPERTS, resident)
    with torch.inference_mode():
        bundle = subject.bundle(torch.device("cuda"), split=split)
    return around(bundle, config_of("auto", share=1.0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10000)
    parser.add_argument("--models", nargs="+", default=["embedded", "flash"])
    parser.add_argument("--places", nargs="+", default=["half", "nothing"])
    given = parser.parse_args()
    swap_all_the_time()
    failed = False
    for name in given.models:
        make = embedded_engine if name == "embedded" else flash_engine
        want: dict[int, Tokens] = {}
        for place in ("everything", *given.places):
            began = time.perf_counter()
            engine = make(place)
            loaded = time.perf_counter()
            found, facts = traffic(engine, given.steps)
            seconds = time.perf_counter() - loaded
            engine.close()
            del engine
            gc.collect()
            torch.cuda.empty_cache()
            want = want or found
            compared, differ = differences(want, found)
            failed |= differ > 0 or compared < given.steps or facts["memory_grew"] > 32 << 20
            failed |= place == "half" and facts["swaps"] < given.steps // 20
            line = {"model": name, "resident": place, "steps": given.steps, "tokens": compared}
            times = {"load_s": round(loaded - began, 1), "run_s": round(seconds, 1)}
            sys.stdout.write(json.dumps({**line, "differ": differ, **facts, **times}) + "\n")
            sys.stdout.flush()
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
