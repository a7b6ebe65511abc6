"""Rounds of speculation on a GPU: every answer is, bit for bit, that of the request alone without drafts."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

from dsv4 import Engine, EngineConfig
from dsv4.config import Dspark, ModelConfig, preset
from dsv4.lab.init import make
from tests.support.stress import cases, growing, stress, truth

pytestmark = pytest.mark.gpu
TINY = preset("tiny")
# So few tokens that drafts of random weights are often right.
SMALL = replace(
    TINY,
    **{"vocab_size": 9, "num_mtp_layers": 3, "dspark": Dspark(5, 7, (0, 2, 3), 24), "index_topk": 16},
    layers=TINY.layers[:4],
)
# V4's own kernels of attention and of the index.
WIDE = replace(SMALL, **{"num_heads": 16, "head_dim": 512, "index_heads": 64, "index_dim": 128, "q_rank": 64})
OPTIONS = EngineConfig(device="cuda", max_context=1536, max_batch=1, prefix_snapshots=0, speculate="off")
MANY = {"prefix_snapshots": 6, "chunk": 300}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[ModelConfig, str], Path]:
    made: dict[str, Path] = {}

    def get(config: ModelConfig, format: str) -> Path:
        key = f"{config} {format}"
        if key not in made:
            made[key] = tmp_path_factory.mktemp("model") / "model"
            for _ in make(made[key], config, format, seed=3):
                pass
        return made[key]

    return get


@pytest.mark.parametrize(
    ("config", "format", "activations"),
    [
        (SMALL, "official", "a16"),
        (WIDE, "official", "a16"),
        (WIDE, "modelopt", "a8"),
        (WIDE, "official", "a4"),
    ],
)
def test_answers(
    saved: Callable[[ModelConfig, str], Path], config: ModelConfig, format: str, activations: str
) -> None:
    """Arrivals, cancels, prefix hits, chunks and shared pages; greedy, sampled, penalised; alone and in
    batches, of which the larger do not draft."""
    path, options = saved(config, format), replace(OPTIONS, activations=activations)
    wanted = cases(24, vocab=config.vocab_size, page=256, seed=5, longest=40)
    alone = truth(Engine.load(path, options), wanted)
    for batch, speculate in ((1, "5"), (3, "auto"), (4, "2"), (12, "5")):
        its = {**MANY, "max_batch": batch, "cache_pages": max(8, 3 * batch), "speculate": speculate}
        engine = Engine.load(path, replace(options, **its))
        assert stress(engine, wanted, alone, requests=80, seed=batch) > 60
        assert 0 < engine.num_accepted < engine.num_drafted, (batch, speculate)


def test_pauses(saved: Callable[[ModelConfig, str], Path]) -> None:
    path, wanted = saved(WIDE, "official"), growing(8, vocab=9, page=256)
    options = replace(OPTIONS, max_context=512)
    alone = truth(Engine.load(path, options), wanted)
    engine = Engine.load(
        path, replace(options, max_batch=4, cache_pages=5, prefix_snapshots=2, speculate="5")
    )
    assert stress(engine, wanted, alone, requests=40) > 25 and engine.scheduler.num_pauses > 3


def test_grammars_and_stops(saved: Callable[[ModelConfig, str], Path]) -> None:
    """A stop id inside accepted drafts ends the answer there."""
    path = saved(WIDE, "official")
    plain, engine = (Engine.load(path, replace(OPTIONS, max_batch=2, speculate=how)) for how in ("off", "5"))
    for ids, params in cases(12, vocab=9, page=256, seed=8, longest=40):
        for stop in (1, 3):
            wanted = replace(params, stop_ids=(stop,), max_tokens=30)
            (want,), (got,) = (e.generate([list(ids)], wanted) for e in (plain, engine))
            assert got.tokens == want.tokens and got.finish_reason == want.finish_reason
