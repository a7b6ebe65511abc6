"""Prints lines and bytes of source per package, and the change since the last tag: make size."""

import subprocess
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = (".py", ".cu", ".cuh", ".js", ".css", ".html")


def git(*arguments: str, given: bytes = b"") -> bytes:
    return subprocess.run(["git", *arguments], cwd=ROOT, input=given, stdout=-1, check=True).stdout


def sources(*listing: str) -> list[str]:
    return [name for name in git(*listing, "-z").decode().split("\0") if name.endswith(SOURCE)]


def package(path: str) -> str:
    """`dsv4/lab/plan.py` -> `dsv4/lab`; `dsv4/disk.py` -> `dsv4`; `tests/lab/test_x.py` -> `tests`."""
    top, *rest = path.split("/")
    return f"{top}/{rest[0]}" if top == "dsv4" and len(rest) > 1 else top


def count(files: dict[str, bytes]) -> tuple[Counter[str], Counter[str]]:
    """-> lines, bytes."""
    lines, size = Counter[str](), Counter[str]()
    for path, data in files.items():
        for name in (package(path), "total"):
            lines[name] += data.count(b"\n")
            size[name] += len(data)
    return lines, size


def at(revision: str) -> tuple[Counter[str], Counter[str]]:
    names, files, start = sources("ls-tree", "-r", "--name-only", revision), {}, 0
    data = git("cat-file", "--batch", given="".join(f"{revision}:{name}\n" for name in names).encode())
    for name in names:  # each as `<object> blob <size>\n<content>\n`
        head = data.index(b"\n", start)
        stop = head + 1 + int(data[start:head].split()[2])
        files[name], start = data[head + 1 : stop], stop + 1
    return count(files)


def main() -> None:
    if not (ROOT / ".git").exists():
        return print("make size counts a git checkout, and this is none")
    since = next(iter(sys.argv[1:] or git("tag", "--sort=-creatordate", "--merged").decode().split()), "")
    before = at(since)[0] if since else None
    there = [name for name in sources("ls-files") if (ROOT / name).exists()]
    lines, size = count({name: (ROOT / name).read_bytes() for name in there})
    print(f"{'package':16} {'lines':>8} {'bytes':>10}  {f'since {since}' if since else 'no tag yet'}")
    for name in sorted({*lines, *(before or ())}):
        change = "" if before is None else f"  {lines[name] - before[name]:+8,}"
        print(f"{name:16} {lines[name]:8,} {size[name]:10,}{change}")


if __name__ == "__main__":
    main()
