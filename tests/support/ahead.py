"""nvcc for GPUs that are not here, in less time and to the same bytes.

Half of the time makes PTX. That of a source which does not tell sm_100 from sm_120 is the same text for both
but for the line that names the GPU: made once, and assembled for each. test_architectures.py compares cubins.
"""

import re
import subprocess
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path

from dsv4.gpu import build
from tests.support.once import made_once

MADE, SERVED = "100a", "120a"


def whole(path: Path) -> str:
    """A source with what it includes."""
    text = path.read_text()
    parts = [
        part for name in re.findall(r'#include "(.*)"', text) for part in build.HEADERS if part.name == name
    ]
    return text + "".join(map(whole, parts))


def is_shared(source: Path) -> bool:
    return "__CUDA_ARCH__ >= 1200" not in whole(source)


def with_shared_ptx(nvcc: build.Compiler, folder: Path) -> build.Compiler:
    """The compiler, which keeps PTX in `folder`."""
    assert nvcc.name == "nvcc"
    return replace(nvcc, compile=partial(_compile, nvcc, folder))


def _compile(nvcc: build.Compiler, folder: Path, source: Path, arch: str) -> bytes:
    if arch not in (MADE, SERVED) or not is_shared(source):
        return nvcc.compile(source, arch)
    flags = (*build.FLAGS, *build.INCLUDES, "-ptx", f"-arch=sm_{MADE}")
    make = lambda out: _run([nvcc.path, "-O3", *flags, "-o", out, source], source, MADE)  # noqa: E731
    text = made_once(folder / f"{source.parent.name}-{source.stem}.ptx", make).read_text()
    text = text.replace(f".target sm_{MADE}\n", f".target sm_{arch}\n")
    assert f".target sm_{arch}\n" in text
    with tempfile.TemporaryDirectory() as made:
        ptx, out = Path(made) / "in.ptx", Path(made) / "out.cubin"
        ptx.write_text(text)
        _run([nvcc.path, "-O3", "-cubin", f"-arch=sm_{arch}", "-o", out, ptx], source, arch)
        return out.read_bytes()


def _run(command: list[str | Path], source: Path, arch: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise build._failed("nvcc", source, arch, done.stderr or done.stdout)
