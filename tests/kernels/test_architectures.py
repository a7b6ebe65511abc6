"""Every kernel for every GPU that it is built for: it compiles, and a block fits on a multiprocessor."""

import os
import re
import subprocess
from pathlib import Path

import pytest
import torch
from step_support import IS_INTERPRETED
from test_cuda_compiles import COMPILERS, LAUNCHES, QUICK, launched, needs_compiler

from dsv4.errors import DeviceError
from dsv4.kernels.common import architectures, build
from dsv4.kernels.common.architectures import ARCHITECTURES, REGISTERS, TILES, Architecture
from tests.support.cubin import resources

pytestmark = pytest.mark.skipif(IS_INTERPRETED, reason="compiles; nothing to interpret")


def whole(path: Path) -> str:
    """A source with what it includes."""
    text = path.read_text()
    parts = [part for name in re.findall(r'#include "(.*)"', text) for part in build.HERE.glob(f"*/{name}")]
    return text + "".join(map(whole, parts))


# Each source for Hopper; one whose code differs between GPUs for the first of each family. What takes long,
# by the compiler's front end alone. All, for all GPUs: -m slow.
DIFFERS = {name for name in build.SOURCES if "__CUDA_ARCH__ >=" in whole(build.source_path(name))}
EACH = [(name, gpu) for gpu in ARCHITECTURES.values() for name in build.sources(gpu.name)]
HERE = [
    (name, gpu)
    for name, gpu in EACH
    if gpu.capability == 90 or (name in DIFFERS and gpu.capability in (100, 120))
]
COMPILED = {(name, gpu) for name, gpu in HERE if name in QUICK and (name != "matvec" or gpu.capability == 90)}


def label(value: str | Architecture) -> str:
    return value if isinstance(value, str) else f"sm_{value.name}"


FREE_SHARED = 48 << 10  # bytes that a kernel may declare itself, whichever GPU
MAX_FRAME = 96  # bytes of a thread that may be spilled: FP8 products of few rows run two blocks, 80 bytes


@needs_compiler
@pytest.mark.parametrize(
    ("source", "gpu"),
    [pytest.param(*pair, marks=[] if pair in COMPILED else [pytest.mark.slow]) for pair in EACH],
    ids=label,
)
def test_cuda_kernels_fit(source: str, gpu: Architecture, monkeypatch: pytest.MonkeyPatch) -> None:
    cubin = build.compile_source(source, gpu.name).read_bytes()
    symbols = build.symbols(cubin)
    assert symbols
    of = {symbol: resources(cubin, symbol) for symbol in symbols}
    for symbol, found in of.items():
        assert found.frame <= MAX_FRAME and found.shared <= FREE_SHARED and found.registers <= 255, symbol
    monkeypatch.setattr(architectures, "capability", lambda device: gpu.capability)
    launches = [item for launch in LAUNCHES for item in launched(launch, monkeypatch)]
    mine = [launch for launch in launches if launch.source == source]
    assert mine
    for launch in mine:
        found = of[build.find(launch.kernel, symbols)]
        # Registers are given out in eights.
        assert -(-found.registers // 8) * 8 * launch.threads <= REGISTERS, (launch, found)
        assert launch.shared + found.shared <= gpu.block_shared, (launch, found)


@pytest.mark.skipif(COMPILERS["nvcc"] is None, reason="nvcc was not found")
@pytest.mark.parametrize(("source", "gpu"), [pair for pair in HERE if pair not in COMPILED], ids=label)
def test_what_takes_long_is_right_for_a_gpu(source: str, gpu: Architecture) -> None:
    """Names, types and templates, in a second; what they become: test_cuda_kernels_fit."""
    using = COMPILERS["nvcc"]
    assert using is not None
    flags = (*build.FLAGS, *build.INCLUDES, f"-arch=sm_{gpu.name}", "-cubin", "-fdevice-syntax-only")
    command = [using.path, *flags, "-o", os.devnull, build.source_path(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@needs_compiler
@pytest.mark.parametrize("gpu", ARCHITECTURES.values(), ids=lambda gpu: gpu.name)
def test_launches_have_the_memory(gpu: Architecture, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a source declares does not depend on the GPU; what is asked for beside it does, and so does what
    there is: a third of Hopper's on sm_120."""
    monkeypatch.setattr(architectures, "capability", lambda device: gpu.capability)
    launches = [item for launch in LAUNCHES for item in launched(launch, monkeypatch)]
    mine = [launch for launch in launches if launch.source in QUICK & {*build.sources(gpu.name)}]
    assert {"matvec", "choose", "sample"} <= {launch.source for launch in mine}
    for launch in mine:
        cubin = build.compile_source(launch.source, build.HOPPER).read_bytes()
        declared = resources(cubin, build.find(launch.kernel, build.symbols(cubin))).shared
        assert launch.shared + declared <= gpu.block_shared, launch


@needs_compiler
@pytest.mark.parametrize("gpu", [ARCHITECTURES[c] for c in (90, 100, 120)], ids=lambda gpu: gpu.name)
def test_fp4_codes_become_numbers_by_an_instruction(gpu: Architecture) -> None:
    """Where there is one: four for the eight codes of a word, which are nine by shifts and masks."""
    triton = pytest.importorskip("triton", reason="its package brings the disassembler")
    disassembler = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    cubin = build.compile_source("unpack", gpu.name)
    sass = subprocess.run([disassembler, "--dump-sass", cubin], capture_output=True, text=True).stdout
    # NVFP4 and MXFP4, to BF16 and float32: eight loads of four words.
    assert sass.count("F2FP.F16.E2M1.UNPACK_B") == (4 * 8 * 4 * 4 if gpu.converts_fp4 else 0)
    assert ("0x8e008e00" in sass) == (not gpu.converts_fp4)


def test_a_tile_is_the_usual_one_or_the_exception(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = {torch.bfloat16: (1,), torch.float32: (2,)}
    assert {family for _, family in TILES} <= {capability // 10 * 10 for capability in ARCHITECTURES}
    for kernel in {kernel for kernel, _ in TILES} | {"another"}:
        for gpu in ARCHITECTURES:
            monkeypatch.setattr(architectures, "capability", lambda device, gpu=gpu: gpu)
            for dtype, tile in usual.items():
                want = TILES.get((kernel, gpu // 10 * 10), {}).get(dtype, tile)
                assert architectures.tile(kernel, usual, dtype, torch.device("cpu")) == want


def test_what_is_known_of_a_gpu() -> None:
    assert "measured on such" in architectures.standing(90)
    for capability in (100, 103, 120, 121):
        assert "built for, not yet measured on" in architectures.standing(capability)
    with pytest.raises(DeviceError, match=r"capability 11\.0: .* built for 9\.0, 10\.0, 10\.3, 12\.0, 12\.1"):
        architectures.standing(110)
