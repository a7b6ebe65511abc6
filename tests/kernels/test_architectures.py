"""Every kernel for every GPU that it is built for: it compiles, and a block fits on a multiprocessor."""

import re
import subprocess
from pathlib import Path

import pytest
import torch
from step_support import IS_INTERPRETED
from test_cuda_compiles import COMPILERS, LAUNCHES, QUICK, Launch, launched, needs_compiler

from dsv4.errors import DeviceError
from dsv4.gpu import architectures, build
from dsv4.gpu.architectures import ARCHITECTURES, TILES, Architecture
from tests.support import ahead
from tests.support.cubin import REGISTERS, parameter_sizes, resources
from tests.support.once import folder_of_run

pytestmark = pytest.mark.skipif(IS_INTERPRETED, reason="compiles; nothing to interpret")
needs_nvcc = pytest.mark.skipif(COMPILERS["nvcc"] is None, reason="nvcc was not found")
EACH = [(name, gpu) for gpu in ARCHITECTURES.values() for name in build.sources(gpu.name)]
# No source tells these from sm_100a and sm_120a: -m slow.
NAMED = [ARCHITECTURES[103], ARCHITECTURES[121]]
# What takes long, in haste: Hopper's products, and the decode step's on Blackwell. In full: -m slow.
LONG = [
    (name, gpu)
    for name, gpu in EACH
    if name not in QUICK or (name == "linear/matvec" and gpu.capability > 90)
]
SLOW = [(name, gpu) for name, gpu in EACH if (name, gpu) in LONG or gpu in NAMED]
UNKNOWN = r"nsupported gpu architecture|invalid value for --gpu-architecture"


def label(value: str | Architecture) -> str:
    return value if isinstance(value, str) else f"sm_{value.name}"


@pytest.fixture
def compiles(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """nvcc makes PTX once for two GPUs and all tests of this run (ahead.py); NVRTC makes each cubin."""
    found = build.compiler()
    if found.name == "nvcc":
        ready = ahead.with_shared_ptx(found, folder_of_run(tmp_path_factory, "ptx"))
        monkeypatch.setattr(build, "compiler", lambda: ready)


def compiled(source: str, gpu: Architecture) -> bytes:
    """A GPU that is newer than the compiler is skipped, and the reason says so."""
    try:
        return build.compile_source(source, gpu.name).read_bytes()
    except DeviceError as error:
        if gpu.was_measured or not re.search(UNKNOWN, str(error)):
            raise
        pytest.skip(str(error))


FREE_SHARED = 48 << 10  # bytes that a kernel may declare itself, whichever GPU
MAX_FRAME = 96  # bytes of a thread that may be spilled: FP8 products of few rows run two blocks, 80 bytes


def launches_of(source: str, gpu: Architecture, monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    """What Python would launch of it on that GPU."""
    monkeypatch.setattr(architectures, "capability", lambda device: gpu.capability)
    every = [item for launch in LAUNCHES for item in launched(launch, monkeypatch)]
    mine = [launch for launch in every if launch.source == source]
    assert mine
    return mine


@needs_compiler
@pytest.mark.parametrize(
    ("source", "gpu"),
    [pytest.param(*pair, marks=[pytest.mark.slow] if pair in SLOW else []) for pair in sorted(EACH, key=str)],
    ids=label,
)
@pytest.mark.usefixtures("compiles")
def test_cuda_kernels_fit(source: str, gpu: Architecture, monkeypatch: pytest.MonkeyPatch) -> None:
    cubin = compiled(source, gpu)
    symbols = build.symbols(cubin)
    assert symbols
    of = {symbol: resources(cubin, symbol) for symbol in symbols}
    for symbol, found in of.items():
        assert found.frame <= MAX_FRAME and found.shared <= FREE_SHARED and found.registers <= 255, symbol
    for launch in launches_of(source, gpu, monkeypatch):
        found = of[build.find(launch.kernel, symbols)]
        # Registers are given out in eights.
        assert -(-found.registers // 8) * 8 * launch.threads <= REGISTERS, (launch, found)
        assert launch.shared + found.shared <= gpu.block_shared, (launch, found)


@needs_nvcc
@pytest.mark.parametrize(("source", "gpu"), [pair for pair in LONG if pair[1] not in NAMED], ids=label)
def test_what_takes_long_compiles(source: str, gpu: Architecture, monkeypatch: pytest.MonkeyPatch) -> None:
    """In haste, assembler included; the registers that it takes in the end: test_cuda_kernels_fit."""
    monkeypatch.setattr(build, "compiler", lambda: COMPILERS["nvcc"])
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "--Ofast-compile=max"))
    try:
        cubin = build.compile_source(source, gpu.name).read_bytes()
    except DeviceError as error:
        if "nknown option" not in str(error):
            raise
        pytest.skip(f"nvcc is older than 12.9; -m slow compiles {source}.cu in full: {error}")
    symbols = build.symbols(cubin)
    for launch in launches_of(source, gpu, monkeypatch):
        symbol = build.find(launch.kernel, symbols)
        assert parameter_sizes(cubin, symbol) == launch.parameters, launch
        assert launch.shared + resources(cubin, symbol).shared <= gpu.block_shared, launch


@needs_nvcc
@pytest.mark.slow
@pytest.mark.parametrize(
    "source", [n for n in build.sources(ahead.SERVED) if ahead.is_shared(build.source_path(n))]
)
def test_shared_ptx_gives_the_bytes_of_a_whole_run(source: str, tmp_path: Path) -> None:
    """What stands for sm_120 above is what nvcc makes of the source by itself."""
    nvcc = COMPILERS["nvcc"]
    assert nvcc is not None
    path = build.source_path(source)
    ours = ahead.with_shared_ptx(nvcc, tmp_path)
    for arch in (ahead.MADE, ahead.SERVED):
        assert ours.compile(path, arch) == nvcc.compile(path, arch)


@needs_compiler
@pytest.mark.parametrize("gpu", [ARCHITECTURES[c] for c in (90, 100, 120)], ids=lambda gpu: gpu.name)
@pytest.mark.usefixtures("compiles")
def test_fp4_codes_become_numbers_by_an_instruction(gpu: Architecture) -> None:
    """Where there is one: four for the eight codes of a word, which are nine by shifts and masks."""
    triton = pytest.importorskip("triton", reason="its package brings the disassembler")
    disassembler = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    cubin = build.compile_source("linear/prefill_unpack", gpu.name)
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
                want = TILES.get((kernel, gpu // 10 * 10), {}).get(dtype.itemsize, tile)
                assert architectures.tile(kernel, usual, dtype, torch.device("cpu")) == want


def test_what_is_known_of_a_gpu() -> None:
    assert "measured on such" in architectures.standing(90)
    for capability in (100, 103, 120, 121):
        assert "built for, not yet measured on" in architectures.standing(capability)
    with pytest.raises(DeviceError, match=r"capability 11\.0: .* built for 9\.0, 10\.0, 10\.3, 12\.0, 12\.1"):
        architectures.standing(110)
