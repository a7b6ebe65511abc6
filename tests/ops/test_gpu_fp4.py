"""Products of NVFP4 codes: the loop that decodes gives the reference's results from the very bytes that FP4
tensor cores would read; so does an emulation of these; and the PTX has their instruction."""

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from gpu_support import DEVICE, IS_GPU, IS_INTERPRETED, move, near, to
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed")

from dsv4.gpu import architectures, tiles
from dsv4.gpu.architectures import ARCHITECTURES
from dsv4.ops.activation import Norm
from dsv4.ops.experts import cpu as experts_cpu
from dsv4.ops.experts import prefill as experts_prefill
from dsv4.ops.linear import cpu as linear_cpu
from dsv4.ops.linear import prefill as linear_prefill
from dsv4.ops.linear import prefill_fp4 as fp4
from dsv4.ops.linear import prefill_product as product
from dsv4.ops.rows import cpu as rows_cpu
from dsv4.ops.rows import prefill as rows_prefill
from dsv4.ops.rows import quantize
from dsv4.quant import codec
from dsv4.quant.codec import encode_weight
from dsv4.quant.formats import Format, QuantTensor
from tests.aot import check_fits, compile_launch, compiling, launching
from tests.support.cubin import resources
from tests.support.layouts import codes_of, swizzle_32_4_4

runs = [
    pytest.mark.skipif(
        not (IS_INTERPRETED or IS_GPU), reason="run by test_gpu_all, interpreted, or on a GPU"
    ),
    *([pytest.mark.gpu] if IS_GPU else []),
]
compiles = pytest.mark.skipif(IS_INTERPRETED, reason="compiles; nothing to interpret")


def marked(function: Any) -> Any:
    for mark in runs:
        function = mark(function)
    return function


def rand(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def hostile(rows: int, width: int) -> Tensor:
    x = rand(rows, width, seed=1)
    x[0] *= 900
    x[1] = 0
    x[2, 3] = 3e4
    x[3] *= 1e-5
    return x.bfloat16()


def bank(groups: list[list[QuantTensor]]) -> tiles.Tiled:
    """Matrices, or pairs of them, in tiles as a GPU with FP4 tensor cores holds them."""
    one = groups[0][0]
    out = tiles.empty(one.format, one.shape, len(groups), len(groups[0]), DEVICE, is_plain=True)
    for index, group in enumerate(groups):
        for half, weight in enumerate(group):
            assert tiles.put(out, index, half, move(weight)).bf16
    return out


def sort(ids: Tensor, weights: Tensor, experts: int, max_cap: int, first: int, ranks: int) -> product.Sorted:
    """As linear/prefill_pack.cu, where there is no GPU: each expert's pairs from a multiple of 16 rows on."""
    cap, pairs, of_rows, cut = min(16, max_cap), [], [], []
    for expert in range(experts):
        own = [at for at, chosen in enumerate(ids.flatten().tolist()) if chosen == first + expert]
        cut += [(expert, len(pairs) + at, min(cap, len(own) - at), 0) for at in range(0, len(own), cap)]
        pad = -len(own) % 16
        pairs += own + [-1] * pad
        of_rows += weights.flatten()[own].tolist() + [0.0] * pad
    unused = [(experts + 7, 1 << 20, 1 << 20, 0)] * 3  # what lies beyond the count is never looked at
    ints = lambda values: torch.tensor(values, dtype=torch.int32)  # noqa: E731
    return product.Sorted(
        pairs=ints(pairs),
        weights=torch.tensor(of_rows),
        tiles=ints(cut + unused),
        counts=ints([len(cut), len(pairs) // 16]),
        choices=ids.shape[1],
        cap=cap,
    )


@pytest.fixture
def on_blackwell(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ops choose as where tensor cores multiply FP4; the kernel decodes, as it does here."""
    monkeypatch.setattr(fp4, "serves", lambda weight, _, how: how == "a4" and isinstance(weight, tiles.Tiled))
    if IS_INTERPRETED:
        monkeypatch.setattr(product, "sort", sort)
        for cap in product.CAPS:
            monkeypatch.setitem(fp4.TILE[90], cap, (32, 256, 4, 1))


def make(n: int, k: int, seed: int) -> QuantTensor:
    return encode_weight(rand(n, k, seed=seed), Format.NVFP4)


@marked
@pytest.mark.parametrize(("rows", "n", "k", "normed"), [(5, 40, 112, False), (18, 72, 528, True)])
@pytest.mark.usefixtures("on_blackwell")
def test_linear(rows: int, n: int, k: int, normed: bool) -> None:
    """The whole op: quantise, or normalise and quantise, then FP4 by FP4."""
    x, stored, norm = hostile(rows, k), make(n, k, seed=2), 1 + 0.1 * rand(k, seed=5)
    weight = bank([[stored]])
    wide = rows_cpu.rms_norm(x, norm, 1e-6) if normed else x
    # Of the reference in float32: in BF16 it would round the inputs' global scales in.
    want = linear_cpu.linear(wide.float(), stored, "a4")

    def run(x: Tensor, dtype: torch.dtype) -> Tensor:
        (rows,) = to(x)
        if normed:
            form = linear_prefill.form(torch.bfloat16, weight, "a4")  # type: ignore[arg-type]
            rows = rows_prefill.normed(rows, Norm(*to(norm), 1e-6, (form,)))
        return linear_prefill.linear(rows, weight, "a4", dtype)

    for dtype in (torch.float32, torch.bfloat16):
        y = run(x, dtype)
        if normed:  # a norm's last bit moves a code now and then: by half a step of one value
            assert float((y.cpu().float() - want).norm() / want.norm()) <= 0.02
        else:
            near(y, want.to(dtype), dtype, "linear")
    assert torch.equal(run(x[3:4], dtype), y[3:4]), "a row sees its company"


@marked
@pytest.mark.parametrize("spills", [False, True])
@pytest.mark.usefixtures("on_blackwell")
def test_experts(spills: bool) -> None:
    """The whole op: routed experts and the shared one. `spills`: each lies where a table says."""
    tokens, d, inner, count, limit = 14, 64, 48, 4, 1.5
    x = hostile(tokens, d) * 0.05
    stored = [
        (make(inner, d, 3 * e), make(inner, d, 3 * e + 1), make(d, inner, 3 * e + 2)) for e in range(count)
    ]
    random = torch.Generator().manual_seed(4)
    ids = torch.stack(
        [torch.tensor([0, 2, 3])[torch.randperm(3, generator=random)[:2]] for _ in range(tokens)]
    )
    weights = rand(tokens, 2, seed=9).abs()
    up, down = bank([[w1, w3] for w1, w3, _ in stored]), bank([[w2] for *_, w2 in stored])
    if spills:
        up, down = map(scattered, (up, down))
    held = tiles.Bank(up, down)
    assert experts_prefill.never_waits(torch.bfloat16, held, "a4")
    # What BF16 rounds between the products moves codes of the second: half a code's step of a few values.
    want = experts_cpu.routed(x.float(), ids, weights, stored, limit, "a4")
    got = experts_prefill.routed(*to(x, ids, weights), held, limit, "a4")
    assert got.shape == want.shape and float((got.cpu() - want).norm() / want.norm()) <= 0.05
    if not spills:
        one = tiles.Bank(up.span(2, 3), down.span(2, 3))
        want = experts_cpu.ffn(x.float(), stored[2], limit, "a4", weights[:, 0])
        got = experts_prefill.ffn(*to(x), one, limit, "a4", *to(weights[:, 0]))
        assert float((got.cpu().float() - want).norm() / want.norm()) <= 0.05
        alone = experts_prefill.ffn(*to(x[7:8]), one, limit, "a4", *to(weights[7:8, 0]))
        assert torch.equal(alone, got[7:8]), "a row sees its company"


def scattered(weight: tiles.Tiled) -> tiles.Tiled:
    """The same matrices, data and scales of each in one piece, in reverse order with gaps."""
    size, its_scale = weight.data[0].numel(), weight.scale[0].numel()
    step = -(-(size + its_scale) // 256) * 256 + 256
    held = torch.zeros(weight.count * step, dtype=torch.uint8, device=weight.data.device)
    places = [(weight.count - 1 - i) * step for i in range(weight.count)]
    for index, place in enumerate(places):
        held[place : place + size] = weight.data[index].flatten()
        held[place + size : place + size + its_scale] = weight.scale[index].flatten()
    return replace(
        weight,
        data=held[:size].view(1, *weight.data.shape[1:]),
        scale=held[size : size + its_scale].view(1, *weight.scale.shape[1:]),
        places=torch.tensor(places, device=held.device),
    )


def swizzled_offset(row: int, block: int, blocks: int) -> int:
    """The 32_4_4 layout, from its description."""
    tile = row // 128 * -(-blocks // 4) + block // 4
    return tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + block % 4


@pytest.mark.parametrize("is_tiled", [False, True])
def test_emulated_tensor_core(is_tiled: bool) -> None:
    """One tile's product byte by byte, as the instruction does it: blocks of 16 products of codes, each sum
    times both block scales, added up; then both global scales. From the bytes of tiles and of packed rows."""
    rows, n, k = 6, 16, 96
    x, weight = hostile(rows, k), encode_weight(rand(n, k, seed=2), Format.NVFP4)
    factor = codec.nvfp4_global(x)
    x_codes, x_scales = codec.nvfp4_rows(x, factor)
    x_bytes = codec.pack_nibbles(x_codes)
    w_bytes, w_scales = (part[0, 0].cpu() for part in codes_of(bank([[weight]])))
    scales = [swizzle_32_4_4(s) if is_tiled else s.flatten() for s in (x_scales, w_scales)]

    def at(row: int, block: int) -> int:
        return swizzled_offset(row, block, k // 16) if is_tiled else row * (k // 16) + block

    value = codec.e2m1_decode(torch.arange(16, dtype=torch.uint8)).tolist()
    scale = codec.e4m3_decode(torch.arange(256, dtype=torch.uint8)).tolist()
    y = torch.zeros(rows, n, dtype=torch.float64)
    for r in range(rows):
        for c in range(n):
            for block in range(k // 16):
                part = 0.0
                for i in range(block * 8, block * 8 + 8):
                    a, b = int(x_bytes[r, i]), int(w_bytes[c, i])
                    part += value[a & 15] * value[b & 15] + value[a >> 4] * value[b >> 4]
                y[r, c] += part * scale[int(scales[0][at(r, block)])] * scale[int(scales[1][at(c, block)])]
    y *= factor.double() * weight.global_scale
    want = linear_cpu.linear(x.float(), weight, "a4")
    error = (y - want.double()).abs().amax(1) / want.abs().amax(1).clamp(min=1e-30)
    assert float(error.max()) <= 1e-6


@compiles
@pytest.mark.parametrize("capability", [90, 100, pytest.param(103, marks=pytest.mark.slow), 120, 121])
def test_what_the_ops_launch(capability: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU of this compute capability, of a4 and NVFP4 weights: the plan, and what its kernels are."""
    meta = lambda *shape, dtype=torch.bfloat16: torch.empty(*shape, dtype=dtype, device="meta")  # noqa: E731
    d, inner, t = 4096, 2048, 300
    found: list[Any] = []
    of_cuda: list[str] = []
    launches = lambda source, kernel, *args, **options: of_cuda.append(kernel)  # noqa: E731
    monkeypatch.setattr(product, "call", launches)
    rows_launch = lambda source, kernel, *args, **options: found.append((kernel.split("<")[0],))  # noqa: E731
    monkeypatch.setattr(quantize, "call", rows_launch)

    def note(kernel: Any, *args: Any, **options: Any) -> None:
        found.append((kernel.fn.__name__, kernel, args, options))

    with launching(note, capability):
        empty = lambda *shape: tiles.empty(Format.NVFP4, *shape, "meta")  # noqa: E731
        dense, held = empty((d, d), 1, 1), tiles.Bank(empty((inner, d), 4, 2), empty((d, inner), 4, 1))
        assert dense.is_plain == (capability >= 100), "the layout of tiles follows the architecture"
        is_served = fp4.serves(dense, torch.bfloat16, "a4")
        assert is_served == (capability in (100, 103, 120))
        assert not fp4.serves(dense, torch.bfloat16, "a16") and not fp4.serves(dense, torch.float32, "a4")
        if not is_served:
            return
        form = linear_prefill.form(torch.bfloat16, dense, "a4")
        ready = rows_prefill.normed(meta(t, d), Norm(meta(d, dtype=torch.float32), 1e-6, (form,)))
        linear_prefill.linear(ready, dense, "a4")
        linear_prefill.linear(meta(9, d), dense, "a4")
        assert experts_prefill.never_waits(torch.bfloat16, held, "a4")
        one = tiles.Bank(held.w13.span(0, 1), held.w2.span(0, 1))
        experts_prefill.ffn(ready, one, 10.0, "a4")
        ids, weights = meta(t, 6, dtype=torch.long), meta(t, 6, dtype=torch.float32)
        experts_prefill.routed(ready, ids, weights, held, 10.0, "a4")
    ours = ["rows_kernel", "_fp4_kernel"]
    few, shared, routed = ours, ["_fp4_kernel", *ours], ["_fp4_kernel", *ours, "_sum_kernel"]
    assert [name for name, *_ in found] == [*ours, *few, *shared, *routed], "one rounding serves all"
    assert of_cuda == ["sort_kernel"]
    products = [launch for launch in found if launch[0] == "_fp4_kernel"]
    for _, kernel, args, options in products[-2:]:
        made = compile_launch(kernel, args, options, capability)  # of the routed experts
        check_fits("fp4", made, capability)
        assert ARCHITECTURES[capability].fp4 in made.asm["ptx"]
        assert "cp.async.cg.shared.global [" in made.asm["ptx"], "tiles are not fetched ahead"


@compiles
@pytest.mark.parametrize("capability", [100, 120])
@pytest.mark.parametrize("rows", [16, *(pytest.param(c, marks=pytest.mark.slow) for c in (32, 64)), 128])
def test_every_height_of_a_tile_compiles(rows: int, capability: int) -> None:
    meta = lambda *shape, dtype=torch.uint8: torch.empty(*shape, dtype=dtype, device="meta")  # noqa: E731
    d, found = 4096, []
    with compiling(lambda name, made: found.append(made), capability):
        x = quantize.Packed(meta(rows, d // 2), meta(rows, d // 16), meta(rows, dtype=torch.float32))
        fp4.product(x, tiles.empty(Format.NVFP4, (d, d), 1, 1, "meta"), meta(rows, d, dtype=torch.bfloat16))
    assert ARCHITECTURES[capability].fp4 in found[0].asm["ptx"]
    check_fits("fp4", found[0], capability)
    assert resources(found[0].asm["cubin"], found[0].metadata.name).frame == 0, "registers are spilled"


def test_unknown_versions_decode_instead() -> None:
    assert fp4.uses_tensor_cores(100, "3.6.0")[0] and fp4.uses_tensor_cores(103, "3.6.0")[0]
    for capability, version, why in (
        (90, "3.6.0", "multiplies no FP4"),
        (121, "3.6.0", r"Triton 3\.6\.0 is not known"),
        (100, "3.8.0", r"Triton 3\.8\.0 is not known .* 3\.6 for sm_100/103/120"),
    ):
        is_used, reason = fp4.uses_tensor_cores(capability, version)
        assert not is_used and re.search(why, reason)
    assert architectures.capability(torch.device("cpu")) == 90
