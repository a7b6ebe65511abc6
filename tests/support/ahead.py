"""nvcc for GPUs that are not here, in less time and to the same bytes.

Half of the time makes PTX, which is the same text for several of them but for the line that names the GPU.
So it is made once, and assembled for each. That cubins equal those of a whole run: test_architectures.py.
"""

import fcntl
import os
import re
import subprocess
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path

from dsv4.kernels.common import build

# Whose PTX an architecture has too: of sources that tell sm_100 from sm_120; of those in which the optimiser
# tells 10.0 and 12.0 from 10.3 and 12.1; of the others.
FAMILIES = {"103a": "100a", "121a": "120a"}
MINORS = {"120a": "100a", "121a": "103a"}
BY_MINOR = ("choose", "queries", "quantize")
ALL = dict.fromkeys(("103a", "120a", "121a"), "100a")


def whole(path: Path) -> str:
    """A source with what it includes."""
    text = path.read_text()
    parts = [part for name in re.findall(r'#include "(.*)"', text) for part in build.HERE.glob(f"*/{name}")]
    return text + "".join(map(whole, parts))


def twin(source: Path, arch: str) -> str:
    """The architecture whose PTX serves this one."""
    tells_families = "__CUDA_ARCH__ >= 1200" in whole(source)
    pairs = FAMILIES if tells_families else MINORS if source.stem in BY_MINOR else ALL
    return pairs.get(arch, arch)


def with_twins(nvcc: build.Compiler, folder: Path) -> build.Compiler:
    """The compiler, which keeps PTX in `folder`."""
    assert nvcc.name == "nvcc"
    return replace(nvcc, compile=partial(_compile, nvcc, folder))


def _compile(nvcc: build.Compiler, folder: Path, source: Path, arch: str) -> bytes:
    if arch == build.HOPPER:
        return nvcc.compile(source, arch)
    of = twin(source, arch)
    text = _ptx(nvcc, folder, source, of).replace(f".target sm_{of}\n", f".target sm_{arch}\n")
    assert f".target sm_{arch}\n" in text
    with tempfile.TemporaryDirectory() as made:
        ptx, out = Path(made) / "in.ptx", Path(made) / "out.cubin"
        ptx.write_text(text)
        _run([nvcc.path, "-O3", "-cubin", f"-arch=sm_{arch}", "-o", out, ptx], source, arch)
        return out.read_bytes()


def _ptx(nvcc: build.Compiler, folder: Path, source: Path, arch: str) -> str:
    """From the folder, where another process may be about to write it."""
    target = folder / f"{source.stem}-{arch}.ptx"
    with (folder / f"{target.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            out = target.with_suffix(f".{os.getpid()}")
            flags = (*build.FLAGS, *build.INCLUDES, "-ptx", f"-arch=sm_{arch}")
            _run([nvcc.path, "-O3", *flags, "-o", out, source], source, arch)
            out.replace(target)
    return target.read_text()


def _run(command: list[str | Path], source: Path, arch: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise build._failed("nvcc", source, arch, done.stderr or done.stdout)
