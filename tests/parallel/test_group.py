"""Ranks that meet: patient until all are ready, strict from then on."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from dsv4.config import preset
from dsv4.engine.eager import Pass
from dsv4.parallel import comm
from dsv4.parallel.comm import Group, Meeting, PeerError
from dsv4.parallel.inbox import GONE, CountedFromZero, Inbox

LATE, SECONDS = 1.5, 0.5


def test_patient_until_all_are_ready(tmp_path: Path) -> None:
    over = threading.Event()

    def rank(number: int) -> list[float]:
        group = Group(Meeting.at(str(tmp_path / "store"), 2), number, ["cpu", "cpu"], SECONDS)
        if number:
            time.sleep(LATE)
        group.begin()
        found = group.gather_columns(torch.tensor([[float(number)]]))[0].tolist()
        if number:
            over.wait(10 * LATE)  # silent, until the other has given up
            return found
        try:
            began = time.monotonic()
            with pytest.raises(PeerError):
                group.gather_columns(torch.zeros(1, 1))
            assert SECONDS / 2 < time.monotonic() - began < 2 * LATE
        finally:
            over.set()
        return found

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(rank, range(2))) == [[0.0, 1.0]] * 2


def test_a_rank_that_does_not_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """gloo's own patience for those that meet was 50 minutes: five times START_SECONDS."""
    monkeypatch.setattr(comm, "MEET_SECONDS", SECONDS)
    found: list[str] = []

    def rank() -> None:
        try:
            Group(Meeting.at(str(tmp_path / "store"), 2), 0, ["cpu", "cpu"], SECONDS)
        except PeerError as error:
            found.append(str(error))

    waiting = threading.Thread(target=rank, daemon=True)
    waiting.start()
    waiting.join(20)
    assert found and "do not find each other" in found[0]


@pytest.mark.parametrize("counts", [[3, 1, 2, 5], [0, 4, 0, 0], [0, 0, 0, 0]])
def test_parts_of_rows_that_ranks_trade(tmp_path: Path, counts: list[int]) -> None:
    rows = [torch.randn(count, 8, 6, generator=torch.Generator().manual_seed(count)) for count in counts]

    def rank(number: int) -> torch.Tensor:
        group = Group(Meeting.at(str(tmp_path / "store"), 4), number, ["cpu"] * 4, 30.0)
        return group.trade_parts(rows[number], counts)

    with ThreadPoolExecutor(4) as pool:
        for number, found in enumerate(pool.map(rank, range(4))):
            assert torch.equal(found, torch.cat(rows)[:, 2 * number : 2 * number + 2])


def test_a_step_that_waited_in_vain(tmp_path: Path) -> None:
    """What a kernel noted, or the host when it heard of a death, ends the step with one sentence."""
    graphs = pytest.importorskip("dsv4.engine.graphs", reason="Triton is not installed").Graphs
    echo = pytest.importorskip("bench.echo")
    executor = graphs.__new__(graphs)
    executor.peers = peers = echo.echo_peers(preset("tiny"), 2, 1, torch.device("cpu"))
    assert executor.fetch(Pass((), None)) == []
    peers.ended.fill_(2)
    with pytest.raises(PeerError, match="rank 1 sent nothing for 20 s"):
        executor.fetch(Pass((), None))
    peers.ended.fill_(0)
    group = Group(Meeting.at(str(tmp_path / "store"), 1), 0, ["cpu"], SECONDS)
    group.abandon()  # nothing waits on a GPU
    group._inbox = Inbox(peers.inbox, peers.addresses, peers.ended, None)
    group.abandon()
    with pytest.raises(PeerError, match="another rank is gone"):
        executor.fetch(Pass((), None))


def test_a_rank_that_is_lost_when_inboxes_are_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the last exchange and the moment from which on its loss would end a step's wait."""
    made = Inbox(torch.zeros(1, 4, dtype=torch.int64), (0,), torch.zeros(1, dtype=torch.int32), None)
    monkeypatch.setattr(comm, "open_inbox", lambda **arguments: made)
    group = Group(Meeting.at(str(tmp_path / "store"), 1), 0, ["cpu"], SECONDS)
    gather = group.gather_columns

    def gather_and_lose(columns: torch.Tensor) -> torch.Tensor:
        found = gather(columns)
        group.abandon()
        return found

    monkeypatch.setattr(group, "gather_columns", gather_and_lose)
    assert group.inbox(4) is made and int(made.ended) == GONE


def test_ranks_that_have_met_others_before(tmp_path: Path) -> None:
    """torch numbers the meetings of symmetric memory in each process by itself: an exchange of values and a
    barrier, as it makes them, of a process whose third meeting this is and of one whose first it is."""

    def rank(number: int) -> list[bytes]:
        file = dist.FileStore(str(tmp_path / "store"), 2)
        store = CountedFromZero(dist.PrefixStore("inbox", file), lambda: False)
        met = 7 * number
        outer = dist.PrefixStore("dsv4--tmp-1", store)
        outer.set_timeout(timedelta(seconds=20))
        found: list[bytes] = []
        for turn in range(met, met + 3):
            outer.set(f"Memory/{turn}/{number}", f"{turn - met} of {number}")
            found += outer.multi_get([f"Memory/{turn}/0", f"Memory/{turn}/1"])
            found.append(str(outer.add(f"Memory/{turn}/members", 1) > 0).encode())
        return found

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(rank, range(2))
    assert first == second and first[3] == b"1 of 0" and first[4] == b"1 of 1"


def test_a_rank_that_is_lost_before_it_meets(tmp_path: Path) -> None:
    """Whoever waits for it in the store, patiently, hears of it."""
    file = dist.FileStore(str(tmp_path / "store"), 2)
    file.set_timeout(timedelta(seconds=600))
    lost = threading.Event()
    store = CountedFromZero(dist.PrefixStore("inbox", file), lost.is_set)
    threading.Timer(0.2, lost.set).start()
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="another rank is gone"):
        store.get("Memory/0/1")
    assert time.monotonic() - began < 5
    lost.clear()
    file.set_timeout(timedelta(seconds=1))
    with pytest.raises(RuntimeError, match=r"(?i)timeout"):
        store.wait(["Memory/0/1"])
