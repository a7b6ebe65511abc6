"""What mhc/decode.py launches of mhc/decode_open.cu, run by the kernel's own source on the CPU: its
structure, its grid, its numbers to the bit. Nothing outside of the arrays is touched."""

import ctypes
import math
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4.gpu import build
from dsv4.ops.exchange.decode import Peers, inbox_places
from dsv4.ops.mhc import decode as mhc
from dsv4.parallel.comm import tree_sum
from dsv4.step.buffers import ROWS
from tests.support.twin import needs_compiler, twin_of

pytestmark = needs_compiler
N, M, VOCAB = 4, 24, 11
F32, BF16 = torch.float32, torch.bfloat16
twin = twin_of("exchange", launched=ctypes.c_char_p)


class Launches:
    """Collects a launch of each rank, then runs them at once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, multiprocessors: int = 1) -> None:
        self.kernels: list[str] = []
        self.params: list[Any] = []
        self.blocks: list[int] = []
        sizes = SimpleNamespace(multi_processor_count=multiprocessors)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: sizes)
        monkeypatch.setattr(mhc, "call", self._note)

    def _note(
        self, source: str, kernel: str, device: Any, params: Any, blocks: int, threads: int, overlap: bool
    ) -> None:
        assert source == "mhc/decode_open" and threads == mhc.THREADS
        self.kernels.append(kernel)
        self.params.append(params)
        self.blocks.append(blocks)

    def run(self, twin: ctypes.CDLL, seed: int) -> None:
        (kernel,), (blocks,) = {*self.kernels}, {*self.blocks}
        addresses = (ctypes.c_void_p * len(self.params))(*map(ctypes.addressof, self.params))
        problem = twin.launched(kernel.encode(), len(self.params), addresses, blocks, seed)
        assert bytes(problem).decode() == ""


def make_peers(size: int, rows: int, d: int) -> list[Peers] | list[None]:
    if size == 1:
        return [None]
    places = inbox_places(rows, d, VOCAB)
    inboxes = [torch.zeros(size, places, dtype=torch.int64) for _ in range(size)]
    return [
        Peers(
            rank=rank,
            rows=rows,
            hidden=d,
            vocab=VOCAB,
            inbox=inboxes[rank],
            addresses=tuple(inbox[rank].data_ptr() for inbox in inboxes),
            ended=torch.zeros(1, dtype=torch.int32),
            seconds=5.0,
        )
        for rank in range(size)
    ]


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def mixed(out: Tensor, start: Tensor, gate: Tensor, comb: Tensor) -> Tensor:
    """mhc.post in the kernel's order, each product and sum rounded: equal to the bit."""
    total = torch.zeros(start.shape)
    for j in range(N):
        total = total + comb[:, j, :, None] * start[:, j, None].float()
    return (gate[..., None] * out.to(start.dtype).float().unsqueeze(1) + total).to(start.dtype)


def added(parts: Tensor) -> Tensor:
    """[T, P, D] in order, in float32."""
    total = torch.zeros(parts[:, 0].shape)
    for part in parts.float().unbind(1):
        total = total + part
    return total


def check_partial(partial: Tensor, streams: Tensor, fn: Tensor) -> None:
    made, sums = streams.double().flatten(1), partial.double().sum(1)
    columns = [m + (m >= N) for m in range(len(fn))]
    torch.testing.assert_close(sums[:, columns], made @ fn.double().t(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(sums[:, N], made.square().sum(1), rtol=1e-5, atol=1e-5)
    assert bool(partial[..., len(fn) + 1 :].isnan().all()), "columns that nobody reads"


@pytest.mark.parametrize(("dtype", "y_dtype"), [(F32, F32), (BF16, F32), (BF16, BF16)])
@pytest.mark.parametrize(("rows", "d", "parts", "mixes"), [(1, 96, 7, M), (7, 40, 9, M), (4, 33, 1, N)])
@pytest.mark.parametrize("size", [1, 2, 8])
def test_open(
    twin: ctypes.CDLL,
    monkeypatch: pytest.MonkeyPatch,
    size: int,
    rows: int,
    d: int,
    parts: int,
    mixes: int,
    dtype: torch.dtype,
    y_dtype: torch.dtype,
) -> None:
    """More rows than programs, chunks that do not fill, the head's four mixes, whole experts."""
    if size > 1 and y_dtype != F32:
        return  # ranks add up in float32
    launches = Launches(monkeypatch, multiprocessors=1)
    start, gate, comb = (
        random(rows, N, d, seed=1).to(dtype),
        random(rows, N, seed=2),
        random(rows, N, N, seed=3),
    )
    fn, y = random(mixes, N * d, seed=4) * d**-0.5, random(size, rows, parts, d, seed=5).to(y_dtype)
    streams, partial = (
        start.repeat(size, 1, 1, 1),
        torch.full((size, rows, mhc.num_chunks(d), mhc.WIDTH), math.nan),
    )
    chosen = torch.randint(
        0, 2 * size + 1, (rows, parts - 1), generator=torch.Generator().manual_seed(6)
    ).int()
    counts, ranks = y_dtype == F32 and parts > 1, make_peers(size, rows, d)
    for rank, peers in enumerate(ranks):
        own = range(2 * rank, 2 * rank + 2)
        if counts:
            y[rank, :, :-1][chosen // 2 != rank] = math.nan
        mhc.mix_open(
            y=y[rank],
            gate=gate,
            comb=comb,
            streams=streams[rank],
            fn=fn,
            partial=partial[rank],
            chosen=chosen if counts else None,
            own=own if counts else range(0),
            peers=peers,
            number=1,
        )
    launches.run(twin, seed=rows)
    shares = torch.stack([added(of_rank.float().nan_to_num(0.0)) for of_rank in y], 1)
    want = mixed(tree_sum(shares) if size > 1 else shares[:, 0], start, gate, comb)
    for rank in range(size):
        assert torch.equal(streams[rank], want), f"rank {rank}"
        check_partial(partial[rank], streams[rank], fn)
    assert not any(it.inbox.any() for it in ranks if it is not None), "a place was not emptied"


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("table_dtype", [F32, BF16])
@pytest.mark.parametrize("size", [1, 2, 8])
def test_embed(
    twin: ctypes.CDLL,
    monkeypatch: pytest.MonkeyPatch,
    size: int,
    dtype: torch.dtype,
    table_dtype: torch.dtype,
) -> None:
    launches, rows, d = Launches(monkeypatch, multiprocessors=1), 5, 40
    table, fn = random(size * VOCAB, d, seed=1).to(table_dtype), random(M, N * d, seed=4) * d**-0.5
    ids = torch.tensor([0, -1, size * VOCAB - 1, (size - 1) * VOCAB, size * VOCAB // 2])
    streams = torch.full((size, rows, N, d), math.nan, dtype=dtype)
    partial = torch.full((size, rows, mhc.num_chunks(d), mhc.WIDTH), math.nan)
    ranks = make_peers(size, rows, d)
    held = [table[rank * VOCAB : (rank + 1) * VOCAB].clone() for rank in range(size)]
    for rank, peers in enumerate(ranks):
        mhc.embed_open(
            ids=ids,
            table=held[rank],
            streams=streams[rank],
            fn=fn,
            partial=partial[rank],
            peers=peers,
            number=0,
        )
    launches.run(twin, seed=1)
    want = table[ids.clamp(min=0)].to(dtype).unsqueeze(1).expand(-1, N, -1)
    for rank in range(size):
        assert torch.equal(streams[rank], want), f"rank {rank}"
        check_partial(partial[rank], streams[rank], fn)


@pytest.mark.parametrize("multiprocessors", [132, 142, 148, 188])
@pytest.mark.parametrize("d", [96, 4096, 7168])
def test_ranks_are_resident(monkeypatch: pytest.MonkeyPatch, d: int, multiprocessors: int) -> None:
    """With peers no more blocks than all multiprocessors surely hold; each row has one for every chunk."""
    text = build.source_path("mhc/decode_open").read_text()
    found = re.search(r"SHARED_BLOCKS = (\d+), BLOCKS = (\d+);", text)
    assert found and (int(found[1]), int(found[2])) == (mhc.SHARED_BLOCKS, mhc.BLOCKS)
    assert text.count("__launch_bounds__(THREADS, IS_SHARED ? SHARED_BLOCKS : BLOCKS)") == text.count(
        "__global__ void __launch"
    )
    assert re.search(r"CHUNK = 32, WIDTH = 32,", text) and (mhc.CHUNK, mhc.WIDTH) == (32, 32)
    chunks = mhc.num_chunks(d)
    for rows in ROWS:
        launches = Launches(monkeypatch, multiprocessors)
        streams, partial = torch.empty(rows, N, d, dtype=BF16), torch.empty(rows, chunks, mhc.WIDTH)
        y, gate, comb, fn = (
            torch.empty(rows, 1, d),
            torch.empty(rows, N),
            torch.empty(rows, N, N),
            torch.empty(M, N * d),
        )
        ids, table = torch.zeros(rows, dtype=torch.long), torch.empty(VOCAB, d, dtype=BF16)
        for peers, most in ((make_peers(2, rows, d)[0], mhc.SHARED_BLOCKS), (None, mhc.BLOCKS)):
            mhc.mix_open(y=y, gate=gate, comb=comb, streams=streams, fn=fn, partial=partial, peers=peers)
            mhc.embed_open(ids=ids, table=table, streams=streams, fn=fn, partial=partial, peers=peers)
            for params, blocks in zip(launches.params[-2:], launches.blocks[-2:], strict=True):
                assert blocks == chunks * params.programs <= most * multiprocessors
                assert 1 <= params.programs <= rows == params.rows


@pytest.mark.parametrize("which", ["gate", "comb"])
def test_what_is_read_16_bytes_at_a_time_is_aligned(monkeypatch: pytest.MonkeyPatch, which: str) -> None:
    Launches(monkeypatch)
    given: dict[str, Any] = {
        **{"y": torch.empty(2, 1, 32), "streams": torch.empty(2, N, 32), "fn": torch.empty(M, N * 32)},
        **{"gate": torch.empty(2, N), "comb": torch.empty(2, N, N), "partial": torch.empty(2, 1, mhc.WIDTH)},
    }
    mhc.mix_open(**given)
    shape = given[which].shape
    with pytest.raises(AssertionError):
        mhc.mix_open(**{**given, which: torch.empty(shape.numel() + 1)[1:].view(shape)})
