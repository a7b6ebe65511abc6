"""Every CUDA source compiles on a machine without a GPU, by NVRTC and by nvcc, and what Python passes to a
kernel is what the kernel takes."""

import ctypes
import os
import re
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from bench.echo import echo_peers
from dsv4 import disk
from dsv4.config import preset
from dsv4.errors import DeviceError
from dsv4.gpu import architectures, build, ceiling, driver, tiles
from dsv4.ops.attention import decode as attention
from dsv4.ops.attention import prefill_sm90 as prompt_attention
from dsv4.ops.exchange import decode as exchange
from dsv4.ops.index import decode as index
from dsv4.ops.index import decode_select as selecting
from dsv4.ops.index import prefill_queries as queries
from dsv4.ops.linear import prefill_product as product
from dsv4.ops.linear import prefill_unpack as unpack
from dsv4.ops.linear.decode import MatVec, Product, Tasks
from dsv4.ops.linear.prefill_packed import FP8_CODES, IN_16_BITS, IN_FP8, empty_packed
from dsv4.ops.mhc import decode as mhc
from dsv4.ops.mhc import prefill_sm90 as streams_kernels
from dsv4.ops.route import decode as routing
from dsv4.ops.sample import decode as sample
from dsv4.quant.formats import Format, empty_rows
from tests.support.cubin import parameter_sizes

COMPILERS = {"NVRTC": build._nvrtc(), "nvcc": build._nvcc()}
# Products of prompts compile for twenty seconds each: with -m slow.
QUICK = {n for n in build.SOURCES if not n.startswith("linear/prefill_sm90")}
SOURCES = [pytest.param(n, marks=[] if n in QUICK else [pytest.mark.slow]) for n in build.SOURCES]
needs_compiler = pytest.mark.skipif(not any(COMPILERS.values()), reason="neither NVRTC nor nvcc was found")


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize("using", COMPILERS)
def test_compiles_for_hopper(using: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = COMPILERS[using]
    if found is None:
        pytest.skip(f"{using} was not found")
    monkeypatch.setattr(build, "compiler", lambda: found)
    path = build.compile_source(name, "90a")
    cubin = path.read_bytes()
    kernels = re.findall(r"\b(\w+_kernel)(?:<|\()", build.source_path(name).read_text())
    assert cubin.startswith(b"\x7fELF")
    assert {re.sub(r"^_Z\d+", "", s).split("_kernel")[0] + "_kernel" for s in build.symbols(cubin)} == set(
        kernels
    )

    def refuse(source: Path, arch: str) -> bytes:
        raise AssertionError("the second time it comes from the cache")

    monkeypatch.setattr(build, "compiler", lambda: replace(found, compile=refuse))
    assert build.compile_source(name, "90a") == path


def test_a_cubin_that_lost_its_bytes_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As by a power cut; and bytes are on disk before their name is."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    made = build.Compiler("fake", "1", Path("fake"), lambda source, arch: b"a cubin")
    monkeypatch.setattr(build, "compiler", lambda: made)
    synced: list[int] = []
    monkeypatch.setattr(disk.os, "fsync", lambda file: synced.append(os.fstat(file).st_size))
    path = build.compile_source("mhc/decode_mix", "90a")
    path.write_bytes(b"")
    assert build.compile_source("mhc/decode_mix", "90a").read_bytes() == b"a cubin" and synced == [7, 7]


def test_each_compiler_and_architecture_has_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name, version in (("NVRTC", "13.0"), ("NVRTC", "13.1"), ("nvcc", "13.0")):
        made = f"{name} {version}".encode()
        using = build.Compiler(name, version, tmp_path, lambda source, arch, made=made: made + arch.encode())  # type: ignore[misc]
        monkeypatch.setattr(build, "compiler", lambda using=using: using)
        for arch in ("90a", "100a"):
            assert build.compile_source("mhc/decode_mix", arch).read_bytes() == made + arch.encode()


def test_every_source_is_found() -> None:
    assert {*build.PACKAGE.rglob("*.cu")} == {*build.SOURCES.values()}
    assert {*build.PACKAGE.rglob("*.cuh")} == {*build.HEADERS}
    names = [path.name for path in build.HEADERS]
    assert len({*names}) == len(names), "an #include names one file"
    assert {*build.ONLY} == {name for name in build.SOURCES if "_sm90" in name}
    assert {*build.ONLY.values()} == {build.HOPPER}


def test_no_source_needs_a_header_that_wheels_may_lack() -> None:
    """stdint.h is nvcc's alone: NVRTC has none. What a host compiler takes of sample.cuh is for tests."""
    allowed = {"types.cuh": {"stdint.h"}, "sample.cuh": {"math.h", "stdint.h", "string.h"}}
    for path in [*build.SOURCES.values(), *build.HEADERS]:
        found = set(re.findall(r"#include <(.*)>", path.read_text()))
        assert found <= allowed.get(path.name, set()), path.name


@pytest.mark.parametrize("using", COMPILERS)
def test_a_broken_source_is_one_sentence(using: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = COMPILERS[using]
    if found is None:
        pytest.skip(f"{using} was not found")
    (tmp_path / "broken.cu").write_text("__global__ void f() { this is not C++; }\n")
    monkeypatch.setattr(build, "source_path", lambda name: tmp_path / f"{name}.cu")
    monkeypatch.setattr(build, "compiler", lambda: found)
    with pytest.raises(
        DeviceError, match=rf"{using} could not compile \S+/broken\.cu for sm_90a: .*error"
    ) as told:
        build.compile_source("broken", "90a")
    assert "\n" not in str(told.value)


def test_a_missing_compiler_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "_nvrtc", lambda: None)
    monkeypatch.setattr(build, "_nvcc", lambda: None)
    with pytest.raises(DeviceError, match=r"neither NVRTC .* nor nvcc .* was found; .*use --device cpu"):
        build.compiler.__wrapped__()


def _compile_alone(folder: str) -> bytes:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", folder)
        return build.compile_source("gpu/ceiling", "90a").read_bytes()


@needs_compiler
def test_processes_that_build_at_once_do_not_hurt_each_other(tmp_path: Path) -> None:
    with ProcessPoolExecutor(3) as pool:
        made = list(pool.map(_compile_alone, [str(tmp_path)] * 3))
    assert made[0] == made[1] == made[2]
    assert len(list((tmp_path / "dsv4" / "kernels").iterdir())) == 1, "one file, and no traces"


@pytest.mark.parametrize(
    ("kernel", "want"),
    [("f", "_Z1f"), ("ab<8, true>", "_Z2abILi8ELb1EE"), ("g<__nv_bfloat16>", "_Z1gI13__nv_bfloat16E")],
)
def test_mangled_names(kernel: str, want: str) -> None:
    assert build.mangled(kernel) == want
    assert build.find(kernel, ["_Z1fIfEvv", "_Z2ab", "_Z1h", f"{want}vPKf"]) == f"{want}vPKf"


def some(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(*shape, dtype=dtype)


def launch_route() -> None:
    tasks = Tasks.empty(2, 6, "cpu")
    for experts in (256, 384):
        for rows in (1, 2):
            ids, chosen = some(rows, dtype=torch.long), some(rows, 6, dtype=torch.int32)
            routing.route(some(rows, experts), some(experts), None, ids, 1.5, False, chosen, tasks)


def launch_select() -> None:
    most = selecting.max_entries(architectures.capability(torch.device("cpu")))
    for capacity in (1000, 4000, 8000, most):
        longs, table = some(2, dtype=torch.long), some(2, 9, dtype=torch.int32)
        out = some(2, 512, dtype=torch.int32)
        selecting.select_rows(some(2, capacity), longs, 4, table, longs, 64, out, mixed=True)


def launch_sample() -> None:
    ids, positions, slots, latest = (some(2, dtype=torch.long) for _ in range(4))
    sample.sample(
        logits=some(2, 300),
        settings=some(2, sample.WIDTH, dtype=torch.long),
        mask=some(2, 10, dtype=torch.int32),
        out=some(2, sample.RESULT, dtype=torch.int32),
        next_ids=ids,
        positions=positions,
        slots=slots,
        latest=latest,
    )


def launch_mix() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        x, streams = some(1, 64, dtype=dtype), some(1, 4, 64, dtype=dtype)
        partial, weight = some(1, mhc.num_chunks(64), mhc.WIDTH), some(64)
        gate, comb = some(1, 4), some(1, 4, 4)
        mhc.mix_close(partial, some(24), some(24), streams, weight, x, gate, comb, 1e-6, 1e-6)


def launch_quantize() -> None:
    quantize = pytest.importorskip("dsv4.ops.rows.quantize")
    for width in (96, 8192):
        x = some(2, width, dtype=torch.bfloat16)
        quantize.round_values(x, x, "a4", some(width), 1e-6, x)
        quantize.pack(x, is_tiled=True)


def launch_exchange() -> None:
    config = replace(preset("tiny"), hidden_size=64)
    peers = echo_peers(config, 2, 2, torch.device("cpu"))
    fn, partial, ids = some(24, 256), some(2, 2, 32), some(2, dtype=torch.long)
    for dtype in (torch.float32, torch.bfloat16):
        streams, table = some(2, 4, 64, dtype=dtype), some(256, 64, dtype=dtype)
        gate, comb = some(2, 4), some(2, 4, 4)
        for ranks in (None, peers):
            mhc.embed_open(ids, table, streams, fn, partial, peers=ranks)
            mhc.mix_open(some(2, 3, 64), gate, comb, streams, fn, partial, peers=ranks)
        mhc.mix_open(some(2, 3, 64, dtype=dtype), gate, comb, streams, fn, partial)
    exchange.gather(peers, 2, some(2, 256), some(2, 512))


def launch_products() -> None:
    weight = tiles.empty(Format.NVFP4, (32, 512), 1, 1, "cpu")
    for dtype in (torch.float32, torch.bfloat16):
        unpack.unpack(weight, some(32, 512, dtype=dtype))
        for rows in (1, 3):
            x, y = some(rows, 512, dtype=dtype), some(rows, 32, dtype=dtype)
            for spread in (False, True):
                MatVec([Product(weight, x, y)], rows, blocks=4, spread=spread).launch()


def launch_prompts() -> None:
    x, ids = some(20, 512, dtype=torch.bfloat16), some(20, 2, dtype=torch.long)
    by = product.sort(ids, some(20, 2), 7, 128)
    ways = [(format, "a16") for format in product.NUMBER] + [(format, "a8") for format in IN_FP8]
    for format, activations in ways:
        up, hidden = tiles.empty(format, (32, 512), 7, 2, "cpu"), some(by.capacity, 32, dtype=torch.bfloat16)
        product.gate_up(product.pack(x, up, activations, by), up, hidden, 1.0, by)
        for rows in (20, 50):
            weight, y = tiles.empty(format, (32, 512), 1, 1, "cpu"), some(rows, 1, 32)
            many = some(rows, 1, 512, dtype=torch.bfloat16)
            product.product(product.pack(many, weight, activations), weight, y)


def launch_attend() -> None:
    q, keys, angles = some(3, 64, 512, dtype=torch.bfloat16), some(9, 512, dtype=torch.bfloat16), some(3, 32)
    longs, table = some(3, dtype=torch.long), some(1, 2, dtype=torch.int32)
    packed = [empty_packed(mode, 3, 4096, q.device, 8) for mode in set(IN_16_BITS.values())]
    for out in (torch.empty_like(q), *packed):
        prompt_attention.attend(
            q=q,
            keys=keys,
            out=out,
            slots=longs,
            positions=longs,
            first=longs,
            window=128,
            ring_size=136,
            ring_rows=4,
            has_pool=True,
            rows=None,
            page_table=table,
            ratio=4,
            page_entries=64,
            sinks=some(64),
            cos=angles,
            sin=angles,
            eps=1e-6,
        )


def launch_attention() -> None:
    ring, angles = empty_rows(Format.KV8, 8, 512, 64), some(3, 32)
    for rows, heads in ((1, 8), (3, 128)):
        q, longs = some(rows, heads, 512, dtype=torch.bfloat16), some(rows, dtype=torch.long)
        attention.attend(
            q=q,
            ring=ring,
            ring_rows=136,
            window=128,
            entries=ring,
            rows=None,
            page_table=some(1, 2, dtype=torch.int32),
            page_entries=64,
            ratio=4,
            slots=longs,
            positions=longs,
            sinks=some(heads),
            cos=angles,
            sin=angles,
            eps=1e-6,
            out=torch.empty_like(q),
        )


def launch_index() -> None:
    iq, longs = some(2, 64, 128, dtype=torch.bfloat16), some(2, dtype=torch.long)
    index.rotate_round(iq, some(3, 32), some(3, 32), longs, overlap=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(index, "serves", lambda iq: True)
        patch.setattr(index, "MAX_ROWS", 2)
        index.scores(
            iq=iq,
            weights=iq[:, :, 0].contiguous(),
            keys=empty_rows(Format.MXFP4, 128, 128, 0),
            page_table=some(2, 2, dtype=torch.int32),
            slots=longs,
            positions=longs,
            out=some(2, 128),
            ratio=4,
            page_entries=64,
            factor=0.1,
        )


def launch_streams() -> None:
    by = product.sort(some(20, 2, dtype=torch.long), some(20, 2), 7, 128)
    for d in (512, 7168):
        x, streams = some(20, d, dtype=torch.bfloat16), some(20, 4, d, dtype=torch.bfloat16)
        fn, gate, comb, mixes = some(4 * d, 24), some(20, 4), some(20, 4, 4), some(24)
        streams_kernels.open_site(None, streams, None, None, fn)
        streams, partial = streams_kernels.open_site(x, streams, gate, comb, fn)
        modes = {FP8_CODES, streams_kernels.IN_BF16}
        site = (streams, partial, mixes, mixes, some(d), 1e-6, 1e-6, 20)
        closed = streams_kernels.close_site(*site, modes, wants_codes=True)
        assert closed.codes is not None
        product.gather(closed.codes, by)


def launch_queries() -> None:
    queries.rotate_round(some(3, 5, 128, dtype=torch.bfloat16), some(3, 32), some(3, 32))


def launch_read() -> None:
    for flight in ceiling.FLIGHTS:
        ceiling.read(some(64), some(1, dtype=torch.int32), flight)


LAUNCHES = [launch_route, launch_select, launch_sample, launch_mix, launch_quantize]
LAUNCHES += [
    launch_exchange,
    launch_products,
    launch_prompts,
    launch_attend,
    launch_attention,
    launch_index,
    launch_streams,
    launch_queries,
    launch_read,
]


@dataclass(frozen=True)
class Launch:
    source: str
    kernel: str
    parameters: list[int]  # bytes of each
    threads: int
    shared: int


def launched(launch: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    """What it would launch on a GPU."""
    seen = []

    def kernel(source: str, name: str, device: torch.device) -> Any:
        def note(
            device: torch.device, arguments: tuple[Any, ...], blocks: int, threads: int, shared: int, *_: Any
        ) -> None:
            parameters = [ctypes.sizeof(driver._value(argument)) for argument in arguments]
            seen.append(Launch(source, name, parameters, threads, shared))

        return SimpleNamespace(launch=note)

    monkeypatch.setattr(build, "_kernel", kernel)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=4)
    )
    launch()
    assert seen
    return seen


@needs_compiler
@pytest.mark.parametrize("source", SOURCES)
def test_arguments_are_what_the_kernels_take(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = [item for launch in LAUNCHES for item in launched(launch, monkeypatch) if item.source == source]
    assert mine
    cubin = build.compile_source(source, "90a").read_bytes()
    for found in mine:
        symbol = build.find(found.kernel, build.symbols(cubin))
        assert parameter_sizes(cubin, symbol) == found.parameters, found
