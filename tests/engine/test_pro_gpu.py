"""V4-Pro's widths on a GPU: logits as on the CPU, greedy tokens, and batches that change no bit.

The model is random, has one layer of each kind and few experts: about 2.5 GB on disk.
"""

import os
import random
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dsv4 import Engine, EngineConfig, SamplingParams
from dsv4.config import LayerSpec, preset
from dsv4.engine.eager import Eager
from dsv4.lab.init import make
from dsv4.lab.score import score_ids

pytestmark = [pytest.mark.gpu, pytest.mark.alone]


def distances(got: Tensor, want: Tensor) -> tuple[Tensor, float]:
    """Relative error of each row, and how many of those with a clear best token have the same one. Clear: it
    leads by a fiftieth of the logits' spread, as in most rows."""
    first, second = want.topk(2).values.unbind(1)
    is_clear = first - second > 0.02 * want.std(dim=1)
    assert is_clear.float().mean() >= 0.7, is_clear
    is_same = got.argmax(1) == want.argmax(1)
    return (got - want).norm(dim=1) / want.norm(dim=1), float(is_same[is_clear].float().mean())


THREADS = len(os.sched_getaffinity(0))
LAYERS = (LayerSpec("sliding", 0, True), LayerSpec("csa", 4, False), LayerSpec("hca", 128, False))
# Few entries are selected, so that short texts have more; `test_decoder_gpu.py` selects Pro's own number.
CONFIG = replace(preset("pro"), layers=LAYERS, num_mtp_layers=0, vocab_size=512, num_experts=8, index_topk=16)
# Prompts and generated tokens of several texts: where two experts, or two entries, are as good as equal, GPU
# and CPU may choose differently, and whatever follows in that text is apart. Blocks of 4 close in all, one of
# 128 in the first. A CPU takes a second for a step.
LENGTHS = ((150, 3), (42, 2), (37, 2), (33, 2), (30, 2))
chance = random.Random(5)
IDS = [[chance.randrange(CONFIG.vocab_size) for _ in range(sum(both))] for both in LENGTHS]


@pytest.fixture(scope="module", autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(THREADS)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", params=["modelopt", "official"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp(f"pro-{request.param}") / "model"
    for _ in make(made, CONFIG, request.param, seed=3, device="cuda"):
        pass
    return made


def engine_on(device: str, folder: Path, **options: object) -> Engine:
    given = {"max_context": 512, "max_batch": 1, "threads": THREADS, **options}
    return Engine.load(folder, EngineConfig(device=device, **given))  # type: ignore[arg-type]


@cache
def cpu_engine(folder: Path, dtype: str) -> Engine:
    return engine_on("cpu", folder, compute_dtype=dtype)


def scores(engine: Engine) -> dict[str, Tensor]:
    """Logits of the prompts' tokens, and of the generated ones."""
    found = [score_ids(engine, ids, length) for ids, (length, _) in zip(IDS, LENGTHS, strict=True)]
    return {name: torch.cat([one[name].cpu() for one in found]) for name in found[0]}


@cache
def on_cpu(folder: Path, dtype: str) -> dict[str, Tensor]:
    return scores(cpu_engine(folder, dtype))


@cache
def shaken(folder: Path) -> dict[str, Tensor]:
    """The CPU's, from embeddings that differ by what float32 sums in another order do: how far such a
    difference goes where the cache rounds and experts are chosen, is the model's own."""
    engine, chance = cpu_engine(folder, "float32"), torch.Generator().manual_seed(1)
    executor = engine.runner.executor
    assert isinstance(executor, Eager)
    embed = executor.model.embed

    def shake(ids: Tensor) -> Tensor:
        x = embed(ids)
        return x * (1 + 5e-7 * torch.randn(x.shape, generator=chance))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(executor.model, "embed", shake)
        return scores(engine)


def test_marks(folder: Path) -> None:
    """float32: the golden models' marks, prompt and decode steps; or as near as the model lets a CPU be."""
    engine = engine_on("cuda", folder, compute_dtype="float32")
    assert engine.settings.tiled
    want = on_cpu(folder, "float32")
    for name, got in scores(engine).items():
        r, top1 = distances(got, want[name])
        median, p90 = r.median().item(), r.quantile(0.9).item()
        what = f"{name}: median {median:.1e}, p90 {p90:.1e}, max {r.max():.1e}, top-1 {top1:.3f}"
        print(folder.parent.name, what, [f"{at}: {e:.1e}" for at, e in enumerate(r.tolist()) if e > 1e-4])
        assert p90 <= 1e-2 and top1 >= 0.99, what
        if median > 1e-4:
            own = distances(shaken(folder)[name], want[name])[0].median().item()
            assert median <= 3 * own, f"{what}; a CPU beside itself: median {own:.1e}"


def test_bfloat16_is_as_close_to_the_reference_as_the_cpu(folder: Path) -> None:
    exact, medians = on_cpu(folder, "float32"), []
    for got in (
        on_cpu(folder, "bfloat16"),
        scores(engine_on("cuda", folder, compute_dtype="bfloat16")),
    ):
        medians.append([distances(got[name], exact[name])[0].median().item() for name in exact])
    print(folder.parent.name, medians)
    for cpu, cuda in zip(*medians, strict=True):
        assert cuda <= 1.3 * cpu + 1e-3, medians


def test_greedy_equals_the_cpu_where_the_margin_is_clear(folder: Path) -> None:
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, logprobs=2)
    engines = cpu_engine(folder, "float32"), engine_on("cuda", folder, compute_dtype="float32")
    on = [engine.generate([IDS[0][:100]], params)[0] for engine in engines]
    same = 0
    for cpu, gpu in zip(on[0].tokens, on[1].tokens, strict=True):
        assert cpu.top and gpu.top
        if cpu.id != gpu.id:
            assert cpu.top[0][1] - cpu.top[1][1] < 0.05, (cpu, gpu)
            break
        same += 1
    assert same >= 5, "the first tokens are the same by a clear margin, or this shows nothing"


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_random_arrivals_equal_runs_alone(folder: Path, dtype: str) -> None:
    """Requests arriving at random: logprobs and tokens bit for bit those of each alone."""
    engine = engine_on("cuda", folder, max_batch=16, compute_dtype=dtype)
    r = random.Random(3)
    wanted = [
        (
            [r.randrange(CONFIG.vocab_size) for _ in range(r.randrange(1, 150))],
            SamplingParams(
                max_tokens=r.randrange(20, 60),
                temperature=r.choice([0.0, 0.0, 0.8]),
                seed=i,
                ignore_eos=True,
                logprobs=1,
            ),
        )
        for i in range(24)
    ]
    single = [engine.generate([ids], params)[0].tokens for ids, params in wanted]
    streams, waiting = [], list(wanted)
    most = 0
    while waiting or engine.num_unfinished:
        while waiting and r.random() < 0.5:
            ids, params = waiting.pop(0)
            streams.append(engine.stream(engine.request(ids, params)))
        if engine.num_unfinished:
            engine.step()
            most = max(most, len(engine.scheduler.running))
    assert most > 8, "more rows than the tensor core has columns"
    assert [stream.completion().tokens for stream in streams] == single
