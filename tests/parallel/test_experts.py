"""Expert parallelism: ranks with whole experts give the bits of one, and of ranks that share their width."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from ranks_support import SECONDS, engine_on
from torch import Tensor

from dsv4 import EngineConfig, SamplingParams
from dsv4.engine.build import Prepared, make_executor
from dsv4.engine.plan import Span
from dsv4.parallel.comm import Group, Meeting
from dsv4.parallel.mesh import Mesh
from tests.parallel.test_shards import WIDE
from tests.support.checkpoints import write_model

EIGHT = replace(WIDE, num_experts=8)
IDS = [(7 * i + i // 9) % EIGHT.vocab_size for i in range(150)]


def logits(folder: Path, store: Path, ranks: int, whole_experts: bool) -> list[tuple[Tensor, Tensor]]:
    """Of each rank, which is a thread: a prompt's and its drafts'."""
    config = EngineConfig(device="cpu", max_context=256, threads=1, expert_parallel=whole_experts)

    def rank(number: int) -> tuple[Tensor, Tensor]:
        prepared = Prepared.make(folder, config, number, ["cpu"] * ranks)
        weights, _ = prepared.load()
        comm = Group(Meeting.at(str(store), ranks), number, ["cpu"] * ranks, SECONDS) if ranks > 1 else None
        mesh = Mesh(number, ranks, comm, whole_experts) if comm else Mesh()
        model, executor = make_executor(prepared.bundle(weights, mesh), prepared.settings, config)
        assert len(model.blocks[0].moe.experts) == 8 // (ranks if whole_experts else 1)  # type: ignore[arg-type]
        executor.set_pages(0, (0,))
        whole, drafts = executor.study(Span(sequence=0, slot=0, start=0, ids=tuple(IDS)), None, IDS)
        assert drafts is not None
        return whole, drafts

    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(rank, range(ranks)))


@pytest.mark.parametrize("style", ["bf16", "official"])
def test_bits_of_one_rank(tmp_path: Path, style: str) -> None:
    folder = write_model(tmp_path / "model", style, EIGHT)
    (want,) = logits(folder, tmp_path / "one", 1, False)
    for ranks in (2, 4) if style == "bf16" else (2,):
        for number, got in enumerate(logits(folder, tmp_path / f"{ranks}", ranks, True)):
            assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1]), (ranks, number)
    by_width = logits(folder, tmp_path / "width", 2, False)
    assert torch.equal(by_width[1][0], want[0])


def test_engine(tmp_path: Path) -> None:
    """As the user starts it, with a batch: tokens one by one, of which some choose no expert of a rank."""
    folder = write_model(tmp_path / "model", "modelopt", EIGHT)
    prompts, params = (
        [IDS[:40], IDS[3:9], [5]],
        SamplingParams(max_tokens=12, seed=1, ignore_eos=True, logprobs=2),
    )
    answers = []
    for options in ({"ranks": 1}, {"ranks": 2, "expert_parallel": True}):
        with engine_on(folder, **options) as engine:  # type: ignore[arg-type]
            answers.append([done.tokens for done in engine.generate(prompts, params)])
    assert answers[0] == answers[1]
