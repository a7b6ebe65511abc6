// Decode step and prompts: activations as a product in FP8 (a8) or NVFP4 (a4) sees them, bit for bit
// codec.py's; quantize.py does the same in Triton. A thread has eight or sixteen neighbouring channels, the
// next lane the next ones; beyond the row they are zero. BF16 channels lie two in a word, the first in the
// low half, and are rounded two at a time. float32 ones, which are for tests, lie each in its own.
#pragma once
#ifdef __CUDACC__
#include "types.cuh"

// Of both halves: all bits are set where that of `a` is the larger number.
__device__ __forceinline__ uint32_t above(uint32_t a, uint32_t b) {
    uint32_t mask;
    asm("set.gt.u32.bf16x2 %0, %1, %2;" : "=r"(mask) : "r"(a), "r"(b));
    return mask;
}
// Of both halves: the larger, the smaller, as integers.
__device__ __forceinline__ uint32_t larger(uint32_t a, uint32_t b) {
    uint32_t out;
    asm("max.u16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
    return out;
}
__device__ __forceinline__ uint32_t smaller(uint32_t a, uint32_t b) {
    uint32_t out;
    asm("min.u16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
    return out;
}
// Bits of `a` where `mask` has ones, else of `b`. (In C++ a chain of these becomes more instructions.)
__device__ __forceinline__ uint32_t pick(uint32_t mask, uint32_t a, uint32_t b) {
    uint32_t out;
    asm("lop3.b32 %0, %1, %2, %3, 0xCA;" : "=r"(out) : "r"(mask), "r"(a), "r"(b));
    return out;
}
// Codes of the nearest E4M3 values, `a` low; ties to even, saturating at 448; NaN stays.
__device__ __forceinline__ uint16_t e4m3_codes(float a, float b) {
    uint16_t codes;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(b), "f"(a));
    return codes;
}
// Of both halves, in FP16: a - b, at least 0 and at most 1; a b, a b + c.
__device__ __forceinline__ uint32_t minus_clamped(uint32_t a, uint32_t b) {
    uint32_t out;
    asm("sub.sat.f16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
    return out;
}
__device__ __forceinline__ uint32_t times_f16(uint32_t a, uint32_t b) {
    return __hmul2(__half2{a}, __half2{b}).bits;
}
// a / b, rounded as the division is, where b, 1 / b and the rest of an approximate quotient are normal
// numbers: the same steps without asking.
__device__ __forceinline__ float quotient(float a, float b) {
    float inverse;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(b));
    inverse = __fmaf_rn(inverse, __fmaf_rn(-b, inverse, 1.f), inverse);
    const float near = __fmul_rn(a, inverse);
    return __fmaf_rn(inverse, __fmaf_rn(-b, near, a), near);
}
// a b + c: one instruction, where C++ becomes two.
__device__ __forceinline__ uint32_t multiply_add(uint32_t a, uint32_t b, uint32_t c) {
    uint32_t out;
    asm("mad.lo.u32 %0, %1, %2, %3;" : "=r"(out) : "r"(a), "r"(b), "r"(c));
    return out;
}
__device__ __forceinline__ uint32_t times_plus(uint32_t a, uint32_t b, uint32_t c) {
    uint32_t out;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(out) : "r"(a), "r"(b), "r"(c));
    return out;
}
#endif

enum { A16 = 0, A4 = 4, A8 = 8 };
constexpr uint32_t SIGNS = 0x80008000u, INF = 0x7F800000u, F32_MAX = 0x7F7FFFFFu;

// Magnitudes are float32's bits: those of NaN are above every number's. For scales infinity counts as the
// largest float.
template <int N> __device__ __forceinline__ uint32_t largest(const uint32_t (&x)[N]) {
    uint32_t top = 0;
#pragma unroll
    for (int i = 0; i < N; ++i) top = larger(top, x[i] & ~SIGNS);
    return max(top & 0xFFFF0000u, top << 16);
}
__device__ __forceinline__ uint32_t largest(const uint2 (&x)[4]) {
    return largest<8>({x[0].x, x[0].y, x[1].x, x[1].y, x[2].x, x[2].y, x[3].x, x[3].y});
}
template <int N> __device__ __forceinline__ uint32_t largest(const float (&x)[N]) {
    uint32_t top = 0;
#pragma unroll
    for (int i = 0; i < N; ++i) top = max(top, __float_as_uint(x[i]) & 0x7FFFFFFFu);
    return top;
}
// Of as many lanes, a power of two, as share a block.
template <int LANES> __device__ __forceinline__ uint32_t over(uint32_t top) {
#pragma unroll
    for (int i = 1; i < LANES; i <<= 1) top = max(top, __shfl_xor_sync(~0u, top, i));
    return top;
}
__device__ __forceinline__ float finite_top(uint32_t top) {
    return __uint_as_float(top == INF ? F32_MAX : top);
}
__device__ __forceinline__ float finite(float v) {
    return copysignf(finite_top(__float_as_uint(v) & 0x7FFFFFFFu), v);
}

// NVFP4's global scale of a row with this largest magnitude.
__device__ __forceinline__ float row_scale(uint32_t top) {
    const float share = __fdiv_rn(finite_top(top), 2688.f);
    return share > 0.f ? share : 1.f;   // zeros, and NaN
}
// The E4M3 code of a block's scale, and what one of that block is worth.
__device__ __forceinline__ uint32_t block_code(uint32_t top, float scale) {
    const float wanted = __fdiv_rn(finite_top(top), __fmul_rn(6.f, scale));
    return e4m3_codes(wanted < 0.001953125f ? 0.001953125f : wanted, 0.f);
}
__device__ __forceinline__ float unit_of(uint32_t code, float scale) {
    return __fmul_rn(e4m3_values((uint16_t)code).x, scale);
}

// Where BF16 magnitudes of a block pass from one E2M1 code to the next: those above edge[i] have a code above
// i. Both halves alike.
//
// The codec rounds x / unit to float32 and that to E2M1, ties to even. So with half an ulp h at the tie m,
// the code goes up above (m + h) unit where the tie goes down, and from (m - h) unit on where it goes up. No
// BF16 number lies on either: 25 bits of m +- h would divide its 8. Rounded down, first to float32 and then
// to BF16, such a product parts the same BF16 numbers. `lift` is a power of two that keeps it from underflow
// before that.
struct Ladder {
    uint32_t edge[7];
};
__device__ __forceinline__ Ladder ladder(float unit, float scale) {
    const bool is_tiny = scale < 0x1p-60f;
    const float u = is_tiny ? unit * 0x1p64f : unit, drop = is_tiny ? 0x1p-64f : 1.f;
    const float tie[7] = {0.25f, 0.75f, 1.25f, 1.75f, 2.5f, 3.5f, 5.f};
    const float half_ulp[7] = {0x1p-26f, -0x1p-25f, 0x1p-24f, -0x1p-24f, 0x1p-23f, -0x1p-23f, 0x1p-22f};
    Ladder out;
#pragma unroll
    for (int i = 0; i < 7; ++i) {
        const uint32_t bits = __float_as_uint(__fmul_rd(__fmaf_rd(tie[i], u, u * half_ulp[i]), drop));
        out.edge[i] = __byte_perm(bits, bits, 0x3232);
    }
    return out;
}

// Two codes, each in the upper four bits of its half; the others are anything.
__device__ __forceinline__ uint32_t codes_of(uint32_t x, const Ladder& by) {
    const uint32_t size = x & ~SIGNS, four = above(size, by.edge[3]),
                   two = above(size, pick(four, by.edge[5], by.edge[1]));
    const uint32_t low = pick(four, by.edge[4], by.edge[0]), high = pick(four, by.edge[6], by.edge[2]);
    const uint32_t one = above(size, pick(two, high, low));
    return pick(SIGNS, x, pick(0x40004000u, four, pick(0x20002000u, two, one)));
}
// Eight codes, the first in the lowest four bits.
__device__ __forceinline__ uint32_t eight_codes(const uint32_t* x, const Ladder& by) {
    const uint32_t ab = __byte_perm(codes_of(x[0], by), codes_of(x[1], by), 0x7351);
    const uint32_t cd = __byte_perm(codes_of(x[2], by), codes_of(x[3], by), 0x7351);
    const uint32_t even = __byte_perm(ab, cd, 0x5410), odd = __byte_perm(ab, cd, 0x7632);
    return (even >> 4 & 0x0F0F0F0Fu) | (odd & 0xF0F0F0F0u);
}

// N words of a row in NVFP4 and back; `top`: their largest.
template <int N> __device__ __forceinline__ void round_a4(uint32_t (&x)[N], uint32_t top, float scale) {
    const float unit = unit_of(block_code(over<8 / N>(top), scale), scale);
    const Ladder by = ladder(unit, scale);
    const float steps[8] = {0.f, 0.5f, 1.f, 1.5f, 2.f, 3.f, 4.f, 6.f};
    uint32_t worth[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) worth[i] = pack_bf16(steps[i] * unit, steps[i] * unit);
#pragma unroll
    for (int i = 0; i < N; ++i) {
        const uint32_t size = x[i] & ~SIGNS;
        uint32_t value = worth[0];
#pragma unroll
        for (int k = 0; k < 7; ++k) value = pick(above(size, by.edge[k]), worth[k + 1], value);
        x[i] = (x[i] & SIGNS) | value;
    }
}

// Rows that `Halves` can take: largest magnitudes from 2^-48 to below 2^127. Others have a scale that
// underflows or values that overflow.
constexpr uint32_t USUAL_TOP = 0x3F800000u;
__device__ __forceinline__ bool is_usual(uint32_t top) {
    return top - 0x27800000u < 0x7F000000u - 0x27800000u;
}
// A block of 16 of such a row in NVFP4 and back, as FP16 pairs times a power of two, which makes the row's
// scale 8 to 16. They are exact: the smallest, half of the scale over 512, is above 2^-7, the largest, 2688
// scales, below 43,200.
//
// FP16 has no comparison as fast as a sum, so a number is compared with an edge by subtracting that, clamped
// to [0, 1]. For this numbers are scaled once more, by the power of two that makes the unit 2^11 to 2^12:
// BF16 neighbours are then 4 apart at the lowest edge, and an edge lies in their middle. Numbers below 2^-14
// come as something smaller than an edge, too. What a clamped difference, 0 or 1, adds is the way from one
// value to the next.
struct Halves {
    static constexpr uint32_t SCALE_AT = 18 << 7, UNIT_AT = 26 << 7, TWICE = 0x40004000u, HALF = 0x38003800u,
                              MINUS = 0xBC00BC00u;
    float scale;
    __device__ __forceinline__ explicit Halves(float scale) : scale(scale) {}
    __device__ __forceinline__ static Halves of_row(uint32_t top) {
        return Halves(quotient(__uint_as_float(top), 2688.f));
    }
    // What undoes the power of two.
    __device__ __forceinline__ float undo() const {
        return __uint_as_float((__float_as_uint(scale) & INF) - (3u << 23));
    }
    __device__ __forceinline__ float unit_of_block(uint32_t top) const {
        const float wanted = quotient(
            __uint_as_float(top), __fmul_rn(6.f, scale));   // too small a one may be anything below the least
        return unit_of(e4m3_codes(fmaxf(wanted, 0.001953125f), 0.f), scale);
    }
    // A BF16 number less this has FP16's exponent, three bits further right.
    __device__ __forceinline__ static uint32_t base(float v, uint32_t at) {
        return __byte_perm(__float_as_uint(v) & INF, 0, 0x3232) - at * 0x10001u;
    }
    __device__ __forceinline__ static uint32_t edge_of(float v) {
        const float middle = __uint_as_float(__byte_perm(__float_as_uint(v), 0x8000u, 0x3254));
        return pack_f16(middle, middle);
    }
    __device__ __forceinline__ void round(uint32_t (&x)[8], float unit) const {
        const float u = __uint_as_float((__float_as_uint(unit) & ~INF) | 138u << 23),
                    ulp = u * 0x1p-24f;   // ties and half ulps as in `ladder`
        uint32_t edge[7] = {edge_of(__fmaf_rd(0.25f, u, 0.25f * ulp)),
                            edge_of(__fmaf_rd(0.75f, u, -0.5f * ulp)), edge_of(__fmaf_rd(1.25f, u, ulp)),
                            edge_of(__fmaf_rd(1.75f, u, -ulp))};
        edge[4] = times_f16(edge[2], TWICE);
        edge[5] = times_f16(edge[3], TWICE);
        edge[6] = times_f16(edge[4], TWICE);
        // One unit and one and a half, rounded to BF16: all others are these times a power of two.
        const uint32_t both = (pack_bf16(unit, 1.5f * unit) - base(scale, SCALE_AT)) * 8;
        const uint32_t one = __byte_perm(both, 0, 0x1010), more = __byte_perm(both, 0, 0x3232);
        const uint32_t half = times_f16(one, HALF), up = times_plus(one, MINUS, more),
                       on = times_plus(one, TWICE, more ^ SIGNS);
        const uint32_t step[7] = {half,
                                  half,
                                  up,
                                  on,
                                  times_f16(up, TWICE),
                                  times_f16(on, TWICE),
                                  times_f16(times_f16(up, TWICE), TWICE)};
        const uint32_t low = base(unit, UNIT_AT);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const uint32_t size = multiply_add(larger(x[i] & ~SIGNS, low), 8, 0u - 8 * low);
            uint32_t value = times_f16(minus_clamped(size, edge[0]), step[0]);
#pragma unroll
            for (int k = 1; k < 7; ++k) value = times_plus(minus_clamped(size, edge[k]), step[k], value);
            x[i] = (x[i] & SIGNS) | value;
        }
    }
};

// Nearest E2M1 value, ties to even, saturating at 6, with the sign of q. 1.5 * 2^22 times the power of two
// below |q|, at least 1, has ulps as wide as E2M1's steps there.
__device__ __forceinline__ float e2m1_round(float q) {
    const float size = fminf(fabsf(q), 6.f);
    const uint32_t bits = __float_as_uint(fmaxf(size, 1.f));
    const float magic = __uint_as_float((bits & 0x7F800000u) + (22u << 23 | 0x400000u));
    return copysignf(__fsub_rn(__fadd_rn(size, magic), magic), q);
}
__device__ __forceinline__ float round_a4(float v, float unit) {
    return e2m1_round(__fdiv_rn(finite(v), unit)) * unit;
}
__device__ __forceinline__ void round_a4(float (&x)[8], uint32_t top, float scale) {
    const float unit = unit_of(block_code(over<2>(top), scale), scale);
    for (float& v : x) v = round_a4(v, unit);
}

// The E8M0 code of a block's scale in FP8; `top`: its largest magnitude.
__device__ __forceinline__ uint32_t scale_a8(uint32_t top) {
    return (__float_as_uint(fmaxf(finite_top(top), 1e-4f) * (float)(1. / 448.)) + 0x7FFFFFu) >> 23;
}
struct Scale8 {
    float unit, inverse;
    __device__ __forceinline__ explicit Scale8(uint32_t top) {
        const uint32_t code = scale_a8(top);
        unit = __uint_as_float(top > INF ? 0x7FC00000u : code << 23);
        inverse = __uint_as_float((254u - code) << 23);
    }
};
// MXFP4: the least power of two that brings 32 values to 6 and below. `top`: bits of the largest.
struct Scale4 {
    float unit, inverse;
    __device__ __forceinline__ explicit Scale4(uint32_t top) {
        const uint32_t code =
            (__float_as_uint(fmaxf(finite_top(top), 6.f * 0x1p-126f) * (1.f / 6.f)) + 0x7FFFFFu) >> 23;
        unit = __uint_as_float(top > INF ? 0x7FC00000u : code << 23);
        inverse = __uint_as_float((254u - code) << 23);
    }
};
// FP8 in blocks of 128 with power-of-two scales, and back. For an E4M3 code BF16's largest number is as good
// as float32's.
template <int N> __device__ __forceinline__ void round_a8(uint32_t (&x)[N]) {
    const Scale8 by(over<64 / N>(largest(x)));
#pragma unroll
    for (int i = 0; i < N; ++i) {
        const uint32_t finite = pick(SIGNS, x[i], smaller(x[i] & ~SIGNS, 0x7F7F7F7Fu));
        const float low = __uint_as_float(finite << 16) * by.inverse,
                    high = __uint_as_float(finite & 0xFFFF0000u) * by.inverse;
        const float2 two = e4m3_values(e4m3_codes(low, high));
        x[i] = pack_bf16(two.x * by.unit, two.y * by.unit);
    }
}
__device__ __forceinline__ void round_a8(float (&x)[8]) {
    const Scale8 by(over<16>(largest(x)));
    for (float& v : x) v = e4m3_values(e4m3_codes(finite(v) * by.inverse, 0.f)).x * by.unit;
}
