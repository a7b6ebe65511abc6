"""Files of kept prefixes: whole or not there, within a limit, least recently used out, shared, damaged."""

import errno
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dsv4.cache import folder as folder_module
from dsv4.cache.folder import HEADER_BYTES, MAGIC, PrefixFolder, chain
from dsv4.errors import ConfigError

IDENTITY, OTHER = "0123456789abcdef" * 2, "f" * 32
DATA = bytes(range(251)) * 4


class Place:
    """A folder, and what it said."""

    def __init__(self, path: Path, max_bytes: int = 1 << 20, identity: str = IDENTITY) -> None:
        self.said: list[str] = []
        self.folder = PrefixFolder(path, identity, max_bytes, self.said.append)

    def write(self, key: bytes, data: bytes = DATA, used: int = 1, kind: str = "page") -> None:
        self.folder.write(key, kind, memoryview(data), used)  # type: ignore[arg-type]

    def read(self, key: bytes, size: int = len(DATA), kind: str = "page") -> bytes | None:
        target = bytearray(size)
        whole = self.folder.read(key, kind, memoryview(target))  # type: ignore[arg-type]
        return bytes(target) if whole else None


def keys(count: int) -> list[bytes]:
    return [chain(bytes(32), [number]) for number in range(count)]


def size_of(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def test_what_was_written_is_read_by_this_process_and_the_next(tmp_path: Path) -> None:
    place, (a, b) = Place(tmp_path / "new" / "deep"), keys(2)
    place.write(a)
    place.write(a, DATA[::-1], kind="snapshot")
    place.write(b, b"")
    for again in (place, Place(tmp_path / "new" / "deep")):
        assert again.read(a) == DATA and again.read(a, kind="snapshot") == DATA[::-1]
        assert again.read(b, 0) == b"" and again.read(b, 0, "snapshot") is None
        assert again.said == []


def test_keys_depend_on_owner_and_every_token_before() -> None:
    roots = [bytes(32), bytes(31) + b"\1"]
    made = {
        chain(chain(root, first), second)
        for root in roots
        for first in ([1, 2], [2, 1], [1])
        for second in ([3], [4])
    }
    assert len(made) == 12
    assert chain(roots[0], [1, 256]) != chain(roots[0], [1, 1])


def test_files_are_private(tmp_path: Path) -> None:
    place = Place(tmp_path / "kept")
    place.write(keys(1)[0])
    for path in (tmp_path / "kept", *(tmp_path / "kept").rglob("*")):
        assert not stat.S_IMODE(path.stat().st_mode) & 0o077, path
    (tmp_path / "open").mkdir(mode=0o755)
    assert "other users can list the folder" in Place(tmp_path / "open").said[0]


@pytest.mark.parametrize("at", [*range(HEADER_BYTES + 3), HEADER_BYTES + 500, HEADER_BYTES + len(DATA) - 1])
def test_every_flipped_bit_is_a_miss_and_said_once(tmp_path: Path, at: int) -> None:
    place, (a, b) = Place(tmp_path), keys(2)
    os.chmod(tmp_path, 0o700)
    for key in (a, b):
        place.write(key)
        path = place.folder.path(key, "page")
        raw = bytearray(path.read_bytes())
        raw[at] ^= 1 << at % 8
        path.write_bytes(raw)
        assert place.read(key) is None
        assert not path.exists(), "or it would stay in the way of a whole one"
    said = [line for line in place.said if "miss" in line]
    assert len(said) == 1 and ("checksum" in said[0] or "version" in said[0])
    place.write(a)
    assert place.read(a) == DATA


@pytest.mark.parametrize(
    "length", [0, 1, len(MAGIC), HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + 500, -1, 1]
)
def test_cut_and_lengthened_files_are_misses(tmp_path: Path, length: int) -> None:
    place, key = Place(tmp_path), keys(1)[0]
    place.write(key)
    path = place.folder.path(key, "page")
    raw = path.read_bytes()
    path.write_bytes(raw[:length] if length != 1 else raw + b"\0")
    assert place.read(key) is None and len([line for line in place.said if "miss" in line]) == 1


def test_a_file_under_the_name_of_another_is_a_miss(tmp_path: Path) -> None:
    place, (a, b) = Place(tmp_path), keys(2)
    place.write(a)
    os.link(place.folder.path(a, "page"), place.folder.path(b, "page"))
    os.link(place.folder.path(a, "page"), place.folder.path(a, "snapshot"))
    assert place.read(b) is None and place.read(a, kind="snapshot") is None and place.read(a) == DATA
    assert place.read(a, len(DATA) - 1) is None, "of another size than the model's"


def test_what_cannot_be_read_is_a_miss(tmp_path: Path) -> None:
    place, (a, b) = Place(tmp_path), keys(2)
    place.folder.path(a, "page").mkdir()
    place.folder.path(b, "page").symlink_to("/etc/hostname")
    assert place.read(a) is None and place.read(b) is None
    assert len([line for line in place.said if "cannot be read" in line]) == 1


def test_the_least_recently_used_go_first_and_the_limit_holds(tmp_path: Path) -> None:
    limit = 40 * (HEADER_BYTES + len(DATA))
    place, names = Place(tmp_path, limit), keys(60)
    for used, key in enumerate(names[:30]):
        place.write(key, used=1000 + used)
    for used, key in enumerate(names[:10]):
        assert place.folder.touch(key, "page", 5000 + used)
    for used, key in enumerate(names[30:]):
        place.write(key, used=2000 + used)
        assert size_of(tmp_path) <= limit
    there = [place.read(key) == DATA for key in names]
    assert all(there[:10]), "used again after the others were written"
    assert all(there[45:]) and not any(there[10:25])
    # A lower limit holds from the first write on.
    low = Place(tmp_path, limit // 4)
    low.write(chain(bytes(32), [99]), used=9000)
    assert size_of(tmp_path) <= limit // 4 and low.read(names[9]) == DATA


def test_writing_again_counts_as_use(tmp_path: Path) -> None:
    place, key = Place(tmp_path), keys(1)[0]
    place.write(key, used=10**9)
    inode = place.folder.path(key, "page").stat().st_ino
    place.write(key, used=2 * 10**9)
    found = place.folder.path(key, "page").stat()
    assert (found.st_ino, found.st_mtime_ns) == (inode, 2 * 10**9)


def test_two_share_a_folder_and_its_limit(tmp_path: Path) -> None:
    """Of one model, and of two: nobody reads the other's, everybody counts them."""
    limit = 64 * (HEADER_BYTES + len(DATA))
    one, two, other = Place(tmp_path, limit), Place(tmp_path, limit), Place(tmp_path, limit, OTHER)
    names = keys(200)
    for used, key in enumerate(names):
        (one, two, other)[used % 3].write(key, used=1000 + used)
        assert size_of(tmp_path) <= limit
    assert one.read(names[199]) == two.read(names[199]) == DATA, "written by two"
    assert other.read(names[197]) == DATA and one.read(names[197]) is None
    late = Place(tmp_path, limit)
    assert any("are of another model, version or setting" in line for line in late.said)


def test_one_removes_what_the_other_is_about_to_read(tmp_path: Path) -> None:
    one, two, key = Place(tmp_path), Place(tmp_path), keys(1)[0]
    one.write(key)
    assert two.folder.has(key, "page")
    one.folder.path(key, "page").unlink()
    assert two.read(key) is None and not two.folder.touch(key, "page", 5)
    assert not [line for line in two.said if "miss" in line], "removed is not damaged"
    two.folder.path(key, "page").parent.rmdir()
    two.write(key)
    assert one.read(key) == DATA


def test_what_is_not_ours_stays(tmp_path: Path) -> None:
    limit = 4 * (HEADER_BYTES + len(DATA))
    place = Place(tmp_path, limit)
    mine = tmp_path / IDENTITY
    strangers = [tmp_path / "notes.txt", mine / "diary", mine / f"{'a' * 63}.page", tmp_path / "b" / "c.page"]
    for path in strangers:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(bytes(10_000))
        os.utime(path, (1, 1))
    for used, key in enumerate(keys(20)):
        place.write(key, used=1000 + used)
    assert all(path.exists() for path in strangers)


def test_unfinished_files_are_ignored_and_go_when_nobody_can_be_writing_them(tmp_path: Path) -> None:
    place = Place(tmp_path)
    fresh, stale = (tmp_path / IDENTITY / name for name in (f".{'0a' * 16}.part", f".{'1b' * 16}.part"))
    for path in (fresh, stale):
        path.write_bytes(MAGIC)
    old = time.time() - folder_module.STALE_SECONDS - 1
    os.utime(stale, (old, old))
    Place(tmp_path)
    assert fresh.exists() and not stale.exists()
    place.write(keys(1)[0])
    assert place.read(keys(1)[0]) == DATA


def test_writers_with_one_process_number_do_not_meet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers in two containers, or two engines in one process: one begins inside another's write."""
    places, (a, b) = [Place(tmp_path), Place(tmp_path)], keys(2)
    real, inner = os.write, [True]

    def write(file: int, data: memoryview) -> int:
        if inner and inner.pop():
            places[1].write(b)
        return real(file, data)

    monkeypatch.setattr(os, "write", write)
    places[0].write(a)
    assert [place.said for place in places] == [[], []]
    assert places[0].read(a) == places[0].read(b) == DATA


def test_a_full_disk_is_said_once_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place, names = Place(tmp_path), keys(3)
    real, left = os.write, [1]

    def write(file: int, data: memoryview) -> int:
        if not left.pop():
            left.append(0)
            raise OSError(errno.ENOSPC, "No space left on device")
        left.append(0)
        return real(file, data)

    monkeypatch.setattr(os, "write", write)
    for key in names:
        place.write(key)
    monkeypatch.undo()
    assert [line for line in place.said if "cannot be written (No space left on device)" in line]
    assert len(place.said) == len(set(place.said)) and size_of(tmp_path) == 0
    place.write(names[0])
    assert place.read(names[0]) is None, "not tried again for a while"
    monkeypatch.setattr(place.folder, "_paused_until", 0.0)
    place.write(names[0])
    assert place.read(names[0]) == DATA


def test_a_file_that_cannot_fit_costs_no_other(tmp_path: Path) -> None:
    place, (a, b) = Place(tmp_path, 2 * (HEADER_BYTES + len(DATA))), keys(2)
    place.write(a)
    place.write(b, DATA * 3)
    assert place.read(a) == DATA and "the limit is" in place.said[-1]


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"prefix_dir .* cannot be used \(.*\); give a folder"):
        Place(tmp_path / "file" / "below")


WRITER = """
import sys
from pathlib import Path
from dsv4.cache.folder import PrefixFolder, chain
folder = PrefixFolder(Path(sys.argv[1]), sys.argv[2], 1 << 24, print)
data = memoryview(bytes(range(256)) * 4096)
print("ready", flush=True)
for number in range(1 << 30):
    folder.write(chain(bytes(32), [number % 40]), "page", data, 1000 + number)
    if number % 40 > 20:
        folder.path(chain(bytes(32), [number % 40]), "page").unlink(missing_ok=True)
"""


def test_killed_at_any_time_files_are_whole(tmp_path: Path) -> None:
    """kill -9 in the middle of writing megabytes, with a second process at the same files."""
    size = 256 * 4096
    os.chmod(tmp_path, 0o700)
    for turn in range(6):
        writers = [
            subprocess.Popen(
                [sys.executable, "-c", WRITER, tmp_path, IDENTITY], stdout=subprocess.PIPE, text=True
            )
            for _ in range(2)
        ]
        for writer in writers:
            assert writer.stdout is not None and writer.stdout.readline() == "ready\n"
        time.sleep(0.03 * (turn + 1))
        for writer in writers:
            writer.send_signal(signal.SIGKILL)
            writer.communicate()
        place = Place(tmp_path, 1 << 24)
        present = [key for key in keys(40) if place.folder.has(key, "page")]
        assert present
        for key in present:
            assert place.read(key, size) == bytes(range(256)) * 4096
        assert place.said == []
    left = [path.name for path in (tmp_path / IDENTITY).iterdir() if path.name.endswith(".part")]
    assert len(left) <= 12, left
