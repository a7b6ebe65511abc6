"""Decode step and prompts: what Triton kernels share. PDL, rounding, norm, RoPE, Hadamard, cache formats.

Everything is float32 inside; "act values" are float32 numbers that the compute type can hold.
"""

from typing import Any

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dsv4.gpu.build import keep_shared_memory

# Triton's interpreter truncates casts to bfloat16 and multiplies the bits of bfloat16 operands.
INTERPRETED: tl.constexpr = tl.constexpr(triton.knobs.runtime.interpret)
F32_MAX: tl.constexpr = tl.constexpr(3.4028234663852886e38)


def launch(kernel: Any, grid: tuple[int, ...], num_warps: int, overlap: bool, **arguments: Any) -> None:
    """A Triton kernel of a step. `overlap`: with PDL, so it may start while the one before it still runs.

    Each program executes launch_dependents and wait_for_prerequisites once. What a kernel reads before the
    wait is declared with its launcher (pdl.py) and loaded from L2 (".cg") if a step writes it: until the
    wait, a line of an earlier kernel may lie in L1.
    """
    options = {} if triton.knobs.runtime.interpret else {"launch_pdl": overlap}
    compiled = kernel[grid](**arguments, num_warps=num_warps, **options)
    if compiled is not None:
        keep_shared_memory(compiled.function)


@triton.jit
def launch_dependents():  # type: ignore[no-untyped-def]
    """The next kernel may start when every program of this one has come here."""
    if not INTERPRETED:
        gdc_launch_dependents()


@triton.jit
def wait_for_prerequisites():  # type: ignore[no-untyped-def]
    """After this the launches before this one are complete and what they wrote is visible (pdl.py)."""
    if not INTERPRETED:
        gdc_wait()


@triton.jit
def to_act(x, ACT: tl.constexpr):  # type: ignore[no-untyped-def]
    """float32 -> the compute type, nearest even."""
    if INTERPRETED and tl.bfloat16 == ACT:
        bits = x.to(tl.uint32, bitcast=True)
        bits = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) << 16
        x = bits.to(tl.float32, bitcast=True)
    return x.to(ACT)


@triton.jit
def rounded(x, ACT: tl.constexpr):  # type: ignore[no-untyped-def]
    """float32 -> the act value next to it."""
    return to_act(x, ACT).to(tl.float32)


@triton.jit
def product(a, b):  # type: ignore[no-untyped-def]
    """a [M, K] b [K, N] -> float32, accumulated in float32; bfloat16 on tensor cores, float32 in full."""
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def channels(ptr, D: tl.constexpr, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    """[SIZE], zero beyond D."""
    c = tl.arange(0, SIZE)
    return tl.load(ptr + c, mask=c < D, other=0.0)


@triton.jit
def norm(x, weight, eps, D: tl.constexpr, ACT: tl.constexpr):  # type: ignore[no-untyped-def]
    """ops.rows.cpu.rms_norm of x [SIZE], zero beyond D; weight [SIZE], or None."""
    x = tl.div_rn(x, tl.sqrt_rn(tl.sum(x * x, 0) * (1.0 / D) + eps))
    if weight is not None:
        x = weight * x
    return rounded(x, ACT)


@triton.jit
def angles(cos_ptr, sin_ptr, position, sign, start, HALF: tl.constexpr, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    """RoPE's cos and sin [SIZE / 2] for `rotate`: HALF pairs from channel `start`, which may lie outside."""
    pair = tl.arange(0, SIZE // 2) - start // 2
    rotates = (pair >= 0) & (pair < HALF)
    at = position.to(tl.int64) * HALF + pair
    cos = tl.load(cos_ptr + at, mask=rotates, other=1.0)
    return cos, tl.load(sin_ptr + at, mask=rotates, other=0.0) * sign


@triton.jit
def rotate(x, cos, sin, ACT: tl.constexpr):  # type: ignore[no-untyped-def]
    """ops._exact.rotate of x [..., D], act values, by cos and sin [..., D / 2]."""
    a, b = tl.split(tl.reshape(x, cos.shape + (2,)))
    return rounded(tl.reshape(tl.join(a * cos - b * sin, a * sin + b * cos), x.shape), ACT)


@triton.constexpr_function
def num_bits(size: int) -> int:
    return size.bit_length()


@triton.jit
def hadamard(x, ACT: tl.constexpr):  # type: ignore[no-untyped-def]
    """ops.index.cpu.hadamard of x [..., D], D a power of two, in the same order of additions."""
    size: tl.constexpr = x.shape[-1]
    # Each step transforms the lowest bit of the channel's number and moves it to the top.
    for _ in tl.static_range(num_bits(size) - 1):
        a, b = tl.split(tl.reshape(x, x.shape[:-1] + (size // 2, 2)))
        x = tl.reshape(tl.trans(tl.join(a + b, a - b)), x.shape)
    return rounded(x * (size**-0.5), ACT)


@triton.jit
def finite(x):  # type: ignore[no-untyped-def]
    """Infinity becomes the largest float; NaN stays."""
    x = tl.maximum(x, -F32_MAX, propagate_nan=tl.PropagateNan.ALL)
    return tl.minimum(x, F32_MAX, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def p2ceil(v):  # type: ignore[no-untyped-def]
    """E8M0 code (int32) of the smallest power of two >= v, for normal float32 v > 0."""
    return (v.to(tl.int32, bitcast=True) + 0x7FFFFF) >> 23


@triton.jit
def power(code):  # type: ignore[no-untyped-def]
    """2^(code-127) for int32 codes 1 .. 254; 0 gives 0; 255, and 254 - 255, give NaN."""
    return tl.where((code & 255) == 255, 0x7FC00000, code << 23).to(tl.float32, bitcast=True)


@triton.jit
def block_scale(blocks, floor, share):  # type: ignore[no-untyped-def]
    """blocks [..., N], finite or NaN -> E8M0 codes (int32) [...] of p2ceil(amax * share); with a NaN, 255.

    As integers, the bits of NaN are above those of every number.
    """
    top = tl.max(blocks.to(tl.int32, bitcast=True) & 0x7FFFFFFF, -1)
    scale = p2ceil(tl.maximum(top.to(tl.float32, bitcast=True), floor) * share)
    return tl.where(top > 0x7F800000, 255, scale)


@triton.jit
def e4m3_encode(x):  # type: ignore[no-untyped-def]
    """float32 -> E4M3 codes (uint8), nearest even, saturating; NaN stays."""
    bits = x.to(tl.uint32, bitcast=True)
    size = tl.minimum(tl.abs(x), 448.0)
    wide = size.to(tl.uint32, bitcast=True)
    normal = ((wide + 0x7FFFF + ((wide >> 20) & 1)) >> 20).to(tl.int32) - 120 * 8
    # Adding 2^23 rounds to whole numbers, here to multiples of the smallest code, 2^-9.
    small = (size * 512.0 + 8388608.0).to(tl.int32, bitcast=True) & 15
    code = tl.where(x != x, 0x7F, tl.where(size < 0.015625, small, normal))
    return (code | ((bits >> 31) << 7).to(tl.int32)).to(tl.uint8)


@triton.jit
def e4m3_decode(code):  # type: ignore[no-untyped-def]
    """E4M3 codes (uint8) -> float32."""
    return code.to(tl.float8e4nv, bitcast=True).to(tl.float32)


@triton.jit
def e2m1_encode(x):  # type: ignore[no-untyped-def]
    """float32 -> E2M1 codes (int32), nearest, ties to even, saturating at 6: codec._E2M1_LAST. NaN: 7."""
    size = tl.abs(x)
    code = (size > 0.25).to(tl.int32) + (size > 0.75 - 2**-24).to(tl.int32)
    code += (size > 1.25).to(tl.int32) + (size > 1.75 - 2**-23).to(tl.int32)
    code += (size > 2.5).to(tl.int32) + (size > 3.5 - 2**-22).to(tl.int32) + (size > 5.0).to(tl.int32)
    code = tl.where(x != x, 7, code)
    return code | ((x.to(tl.uint32, bitcast=True) >> 31) << 3).to(tl.int32)


@triton.jit
def e2m1_decode(code):  # type: ignore[no-untyped-def]
    """int32 codes 0 .. 15 -> float32. The three low bits are those of a tiny float, 2^126 below."""
    bits = ((code & 7) << 22) | ((code & 8) << 28)
    return bits.to(tl.float32, bitcast=True) * 8.507059173023462e37


@triton.jit
def mxfp4_blocks(x):  # type: ignore[no-untyped-def]
    """x [..., D] -> E2M1 codes [..., D / 32, 32] and E8M0 codes [..., D / 32], int32. 32 divides D."""
    blocks = tl.reshape(finite(x), x.shape[:-1] + (x.shape[-1] // 32, 32))
    scale = block_scale(blocks, 6.0 * 2.0**-126, 1.0 / 6.0)
    return e2m1_encode(blocks * tl.expand_dims(power(254 - scale), -1)), scale


@triton.jit
def put_kv8(x, data_ptr, rope_ptr, scale_ptr, row, NOPE: tl.constexpr, ROPE: tl.constexpr,  # type: ignore[no-untyped-def]
            ROW: tl.constexpr, ROPE_ROW: tl.constexpr, SCALES: tl.constexpr, SIZE: tl.constexpr,
            ACT: tl.constexpr):  # fmt: skip
    """codec.encode_kv of x [SIZE], act values, into a row of a KV8 store; ROW counts bytes, ROPE_ROW acts."""
    c = tl.arange(0, SIZE)
    blocks = tl.reshape(tl.where(c < NOPE, finite(x), 0.0), (SIZE // 64, 64))
    scale = block_scale(blocks, 1e-4, 1.0 / 448.0)
    codes = e4m3_encode(blocks * power(254 - scale)[:, None])
    tl.store(data_ptr + row * ROW + c, tl.reshape(codes, (SIZE,)), mask=c < NOPE)
    tl.store(rope_ptr + row * ROPE_ROW + c - NOPE, x.to(ACT), mask=(c >= NOPE) & (c < NOPE + ROPE))
    block = tl.arange(0, SIZE // 64)
    tl.store(scale_ptr + row * SCALES + block, scale.to(tl.uint8), mask=block * 64 < NOPE)
    # The padding of a row's scales is zero.
    block = tl.arange(0, triton.next_power_of_2(SCALES))
    beyond = (block * 64 >= NOPE) & (block < SCALES)
    tl.store(scale_ptr + row * SCALES + block, tl.zeros_like(block).to(tl.uint8), mask=beyond)


@triton.jit
def put_mxfp4(x, data_ptr, scale_ptr, row, D: tl.constexpr):  # type: ignore[no-untyped-def]
    """codec.encode_kv of x [D] into one row of an MXFP4 store."""
    codes, scale = mxfp4_blocks(x)
    low, high = tl.split(tl.reshape(codes, (D // 2, 2)))
    tl.store(data_ptr + row * (D // 2) + tl.arange(0, D // 2), (low | (high << 4)).to(tl.uint8))
    tl.store(scale_ptr + row * (D // 32) + tl.arange(0, D // 32), scale.to(tl.uint8))
