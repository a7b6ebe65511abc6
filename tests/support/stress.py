"""Many short requests that share prefixes, come, go and are cancelled, each against its run alone."""

import random
from collections.abc import Callable
from typing import Any

from dsv4 import Engine, SamplingParams
from dsv4.engine.request import Completion

Case = tuple[tuple[int, ...], SamplingParams]


def cases(count: int, vocab: int, page: int, seed: int = 0, longest: int = 150) -> list[Case]:
    """Prompts that share whole pages with others, of lengths around the ends of blocks and pages."""
    lengths = [length for length in (1, 2, 3, 5, 9, 17, 40, 150) if length <= longest]
    chance = random.Random(seed)
    stems = [[chance.randrange(5, vocab) for _ in range(4 * page)] for _ in range(3)]
    made = []
    for number in range(count):
        stem = chance.choice(stems)[: chance.choice([0, page - 1, page, page + 1, 2 * page, 3 * page + 7])]
        ids = stem + [chance.randrange(5, vocab) for _ in range(chance.randint(1, 40))]
        params = SamplingParams(
            max_tokens=chance.choice(lengths),
            temperature=chance.choice([0.0, 0.0, 0.8]),
            top_p=chance.choice([1.0, 0.9]),
            top_k=chance.choice([0, 50]),
            seed=number,
            logprobs=chance.choice([None, 0, 3]),
            ignore_eos=True,
            **penalties(chance, vocab),
        )
        made.append((tuple(ids), params))
    return made


def penalties(chance: random.Random, vocab: int) -> dict[str, Any]:
    """Of two requests in five: enough to change what is chosen."""
    if chance.random() < 0.6:
        return {}
    return {
        "presence_penalty": chance.choice([0.0, 0.9, -0.5]),
        "frequency_penalty": chance.choice([0.0, 0.7, -0.2]),
        "repetition_penalty": chance.choice([1.0, 1.3]),
        "logit_bias": {chance.randrange(5, vocab): chance.choice([-100.0, 2.5, 4.0]) for _ in range(20)},
    }


def growing(count: int, vocab: int, page: int, seed: int = 0) -> list[Case]:
    """Prompts of less than a page whose answers need another: with few pages, somebody must pause."""
    chance = random.Random(seed)
    made = []
    for number in range(count):
        ids = [chance.randrange(5, vocab) for _ in range(page - 70)]
        params = SamplingParams(
            max_tokens=100,
            temperature=0.7 * (number % 2),
            seed=number,
            ignore_eos=True,
            **penalties(chance, vocab),
        )
        made.append((tuple(ids), params))
    return made


def truth(engine: Engine, wanted: list[Case]) -> list[Completion]:
    return [engine.generate([list(ids)], params)[0] for ids, params in wanted]


def stress(
    engine: Engine,
    wanted: list[Case],
    alone: list[Completion],
    requests: int,
    seed: int = 1,
    report: Callable[[str], None] = print,
) -> int:
    """-> how many answers were compared; an answer that differs ends it with what was found."""
    chance = random.Random(seed)
    running: dict[int, object] = {}
    compared = submitted = cancelled = 0
    most = 2 * engine.config.max_batch
    while submitted < requests or running:
        while submitted < requests and len(running) < most and chance.random() < 0.5:
            ids, params = wanted[which := chance.randrange(len(wanted))]
            running[submitted] = (which, engine.stream(engine.request(list(ids), params)))
            submitted += 1
        if engine.num_unfinished:
            # Chunks beside others as no clock would choose them.
            engine.pace.limit = chance.choice([7, 64, 256, 300, engine.settings.chunk])
            engine.step()
        for number, (which, stream) in list(running.items()):  # type: ignore[misc]
            if stream.output.sequence.finish_reason:
                done, want = stream.completion(), alone[which]
                assert done.tokens == want.tokens, (number, which, done.tokens, want.tokens)
                compared += 1
                del running[number]
            elif chance.random() < 0.002:
                stream.close()
                cancelled += 1
                del running[number]
    pool = engine.slots.pool
    assert pool.num_available == pool.num_pages and engine.slots.num_free == engine.config.max_batch
    report(
        f"{submitted} requests, {compared} compared, {cancelled} cancelled, "
        f"{engine.scheduler.num_pauses} pauses, {engine.prefix.num_snapshots} snapshots"
    )
    return compared
