// Decode step and prompts: activations as a product in FP8 (a8) or NVFP4 (a4) sees them, bit for bit codec.py's; quantize.py does the same in Triton.
// A thread has eight neighbouring channels, lanes side by side sixteen, and so on. What lies beyond the row is zero.
#pragma once
#include "types.cuh"

enum { A16 = 0, A4 = 4, A8 = 8 };
constexpr int ROUNDED = 8;

// Magnitude as bits: those of NaN are above every number's. Infinity becomes the largest float.
__device__ __forceinline__ uint32_t magnitude(float v) {
    const uint32_t bits = __float_as_uint(v) & 0x7FFFFFFFu;
    return bits == 0x7F800000u ? 0x7F7FFFFFu : bits;
}
__device__ __forceinline__ float finite(float v) { return __uint_as_float(magnitude(v) | (__float_as_uint(v) & 0x80000000u)); }

// The largest of a thread's channels, and of the `lanes` (a power of two) that share a block with it.
__device__ __forceinline__ uint32_t largest(const float (&v)[ROUNDED], int lanes) {
    uint32_t top = 0;
#pragma unroll
    for (int i = 0; i < ROUNDED; ++i) top = max(top, magnitude(v[i]));
    for (int i = 1; i < lanes; i <<= 1) top = max(top, __shfl_xor_sync(~0u, top, i));
    return top;
}

// Codes of the nearest E4M3 values, `a` low; ties to even, saturating at 448; NaN stays.
__device__ __forceinline__ uint16_t e4m3_codes(float a, float b) {
    uint16_t codes;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(b), "f"(a));
    return codes;
}
__device__ __forceinline__ float2 e4m3_round(float a, float b) {
    uint32_t halves;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(e4m3_codes(a, b)));
    return __half22float2(__half2{halves});
}

// Nearest E2M1 value, ties to even, saturating at 6, with the sign of x. 1.5 * 2^22 times the power of two below |q|, at
// least 1, has ulps as wide as E2M1's steps there.
__device__ __forceinline__ float e2m1_round(float q, float x) {
    const float size = fminf(fabsf(q), 6.f);
    const uint32_t bits = __float_as_uint(fmaxf(size, 1.f));
    const float magic = __uint_as_float((bits & 0x7F800000u) + (22u << 23 | 0x400000u));
    const float value = __fsub_rn(__fadd_rn(size, magic), magic);
    return __uint_as_float(__float_as_uint(value) | (__float_as_uint(x) & 0x80000000u));
}

// NVFP4; `row`: the magnitude of the row's largest. One reciprocal for all channels and two of Markstein's corrections round
// as a division does where nothing under- or overflows; with one, three of 67,200 quotients beside ties fell to the other side.
__device__ __forceinline__ void round_a4(float (&v)[ROUNDED], uint32_t row) {
    const float share = __fdiv_rn(__uint_as_float(row), 2688.f);
    const float scale = share > 0.f ? share : 1.f;   // zeros, and NaN
    const float wanted = __fdiv_rn(__uint_as_float(largest(v, 2)), 6.f * scale);
    const float unit = e4m3_round(wanted < 0.001953125f ? 0.001953125f : wanted, 0.f).x * scale;
    if (scale > 0x1p-80f && scale < 0x1p80f) {   // all threads of a row alike
        const float inverse = __frcp_rn(unit);
#pragma unroll
        for (int i = 0; i < ROUNDED; ++i) {
            const float x = finite(v[i]);
            float q = __fmul_rn(x, inverse);
            q = __fmaf_rn(__fmaf_rn(-q, unit, x), inverse, q);
            q = __fmaf_rn(__fmaf_rn(-q, unit, x), inverse, q);
            v[i] = e2m1_round(q, x) * unit;
        }
    } else
#pragma unroll 1
        for (int i = 0; i < ROUNDED; ++i) v[i] = e2m1_round(__fdiv_rn(finite(v[i]), unit), v[i]) * unit;
}

// The E8M0 code of a block's scale; `top`: the magnitude of its largest.
__device__ __forceinline__ uint32_t scale_a8(uint32_t top) {
    return (__float_as_uint(fmaxf(__uint_as_float(top), 1e-4f) * (float)(1. / 448.)) + 0x7FFFFFu) >> 23;
}
// FP8 in blocks of 128 with power-of-two scales.
__device__ __forceinline__ void round_a8(float (&v)[ROUNDED]) {
    const uint32_t top = largest(v, 16);
    const uint32_t code = scale_a8(top);
    const bool is_nan = top > 0x7F800000u;
    const float unit = __uint_as_float(is_nan ? 0x7FC00000u : code << 23), inverse = __uint_as_float((254u - code) << 23);
#pragma unroll
    for (int i = 0; i < ROUNDED; i += 2) {
        const float2 two = e4m3_round(finite(v[i]) * inverse, finite(v[i + 1]) * inverse);
        v[i] = two.x * unit;
        v[i + 1] = two.y * unit;
    }
}
