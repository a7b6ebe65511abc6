"""Every kernel for every GPU that it is built for: it compiles, and a block fits on a multiprocessor."""

import subprocess
from pathlib import Path

import pytest
import torch
from step_support import IS_INTERPRETED
from test_cuda_compiles import LAUNCHES, launched, needs_compiler

from dsv4.errors import DeviceError
from dsv4.kernels.common import architectures, build
from dsv4.kernels.common.architectures import ARCHITECTURES, REGISTERS, TILES, Architecture
from tests.support.cubin import resources

pytestmark = pytest.mark.skipif(IS_INTERPRETED, reason="compiles; nothing to interpret")
# The twins of these differ in name alone, as far as these kernels are concerned.
SLOW = {103, 121}
# And this one compiles for fifteen seconds each time.
LONG = {("matvec", 100), ("matvec", 120)}
EACH = [
    pytest.param(
        *(source, a),
        id=f"{source}-sm_{a.name}",
        marks=[pytest.mark.slow] if a.capability in SLOW or (source, a.capability) in LONG else [],
    )
    for source in build.SOURCES
    for a in ARCHITECTURES.values()
]
FREE_SHARED = 48 << 10  # bytes that a kernel may declare itself, whichever GPU
MAX_FRAME = 96  # bytes of a thread that may be spilled: FP8 products of few rows run two blocks, 80 bytes


@needs_compiler
@pytest.mark.parametrize(("source", "gpu"), EACH)
def test_cuda_kernels_fit(source: str, gpu: Architecture, monkeypatch: pytest.MonkeyPatch) -> None:
    if build.ONLY.get(source, gpu.name) != gpu.name:
        pytest.skip(f"{source}.cu is for sm_{build.ONLY[source]} alone; elsewhere Triton's products run")
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


@needs_compiler
@pytest.mark.parametrize("gpu", ARCHITECTURES.values(), ids=lambda gpu: gpu.name)
def test_what_the_step_launches_has_the_memory(gpu: Architecture, monkeypatch: pytest.MonkeyPatch) -> None:
    """What matvec.cu declares does not depend on the GPU; what is asked for beside it does, and so does what
    there is: a third of Hopper's on sm_120."""
    monkeypatch.setattr(architectures, "capability", lambda device: gpu.capability)
    cubin = build.compile_source("matvec", build.HOPPER).read_bytes()
    launches = [item for launch in LAUNCHES for item in launched(launch, monkeypatch)]
    mine = [launch for launch in launches if launch.source == "matvec"]
    assert mine
    for launch in mine:
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
