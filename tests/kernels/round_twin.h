// What gpu/round.cuh takes from the GPU, on the CPU.
#pragma once
#include "fragments_twin.h"

inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline float down(double v) {
    const float near = (float)v;
    return (double)near > v ? nextafterf(near, -INFINITY) : near;
}
// Exact in float64 where this is used: tie and half an ulp have 27 bits together, `a` has 24.
inline float __fmaf_rd(float a, float b, float c) { return down((double)a * b + c); }
inline float __fmul_rd(float a, float b) { return down((double)a * b); }
inline float __frcp_rn(float v) { return 1.f / v; }
inline float __expf(float v) { return expf(v); }
template <typename F> uint32_t halves(uint32_t a, uint32_t b, F f) {
    return (uint32_t)f((uint16_t)(a >> 16), (uint16_t)(b >> 16)) << 16 |
           (uint16_t)f((uint16_t)a, (uint16_t)b);
}
inline uint32_t above(uint32_t a, uint32_t b) {
    return halves(a, b, [](uint16_t a, uint16_t b) {
        return __uint_as_float((uint32_t)a << 16) > __uint_as_float((uint32_t)b << 16) ? 0xFFFF : 0;
    });
}
inline uint32_t larger(uint32_t a, uint32_t b) {
    return halves(a, b, [](uint16_t a, uint16_t b) { return max(a, b); });
}
inline uint32_t smaller(uint32_t a, uint32_t b) {
    return halves(a, b, [](uint16_t a, uint16_t b) { return min(a, b); });
}
inline uint32_t pick(uint32_t mask, uint32_t a, uint32_t b) { return (mask & a) | (~mask & b); }
// FP16 by way of float64, which holds products of two and their sum with a third exactly.
inline double wide(uint16_t bits) { return f16_value(bits); }
inline uint16_t f16(double v) {
    const uint16_t sign = signbit(v) ? 0x8000 : 0;
    if (v != v) return 0x7FFF;
    const double size = fabs(v);
    if (size >= 65520.) return sign | 0x7C00;
    if (size == 0.) return sign;
    const int exponent = max(ilogb(size), -14);
    const int units = (int)nearbyint(
        ldexp(size, 10 - exponent));   // of the last place; 2048 is the next power's first
    return sign | (uint16_t)(((exponent + 14) << 10) + units);
}
inline uint32_t minus_clamped(uint32_t a, uint32_t b) {
    return halves(a, b, [](uint16_t a, uint16_t b) {
        const double v = wide(a) - wide(b);
        return f16(v != v ? 0. : min(max(v, 0.), 1.));
    });
}
inline uint32_t times_f16(uint32_t a, uint32_t b) {
    return halves(a, b, [](uint16_t a, uint16_t b) { return f16(wide(a) * wide(b)); });
}
inline float quotient(float a, float b) { return a / b; }
inline uint32_t multiply_add(uint32_t a, uint32_t b, uint32_t c) { return a * b + c; }
inline uint32_t times_plus(uint32_t a, uint32_t b, uint32_t c) {
    const auto one = [](uint32_t a, uint32_t b, uint32_t c) {
        return (uint32_t)f16(wide(a) * wide(b) + wide(c));
    };
    return one(a & 0xFFFF, b & 0xFFFF, c & 0xFFFF) | one(a >> 16, b >> 16, c >> 16) << 16;
}
// By search: larger codes of one sign are larger values.
inline int e4m3_code(float v) {
    const int sign = signbit(v) ? 128 : 0;
    if (v != v) return sign | 127;
    int code = 0;
    while (code < 126 && e4m3_value(code + 1) <= fabsf(v)) ++code;
    if (code == 126) return sign | 126;
    const float middle = (e4m3_value(code) + e4m3_value(code + 1)) / 2;
    return sign | (code + (fabsf(v) > middle || (fabsf(v) == middle && code & 1)));
}
inline uint16_t e4m3_codes(float a, float b) { return e4m3_code(a) | e4m3_code(b) << 8; }
inline float2 e4m3_values(uint16_t codes) {
    return {e4m3_value((uint8_t)codes), e4m3_value((uint8_t)(codes >> 8))};
}
