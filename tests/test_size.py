"""`make size`: what is counted, and where."""

import subprocess

import pytest
import size


def test_lines_and_bytes_are_counted_by_package() -> None:
    lines, num_bytes = size.count({"dsv4/lab/a.py": b"1\n2\n", "dsv4/disk.py": b"x\n", "tests/lab/b.py": b""})
    assert lines == {"dsv4/lab": 2, "dsv4": 1, "tests": 0, "total": 3}
    assert num_bytes["total"] == 6


def test_an_earlier_revision_is_counted_as_its_files_were() -> None:
    if not (size.ROOT / ".git").exists():
        pytest.skip("no git checkout")
    command = ["git", "grep", "-ch", "", "HEAD", "--", "dsv4/models/*.py"]
    found = subprocess.run(command, cwd=size.ROOT, capture_output=True, text=True, check=True).stdout
    assert size.at("HEAD")[0]["dsv4/models"] == sum(map(int, found.split())) > 10
