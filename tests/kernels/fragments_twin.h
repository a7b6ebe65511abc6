// kernels/decode/fragments.cuh and what it includes, on the CPU.
#pragma once
#include "emulator.h"
#include "vectors.h"

#include <math.h>

#include <map>

using std::max;

struct __nv_bfloat16 {
    uint16_t bits;
};
struct __half2 {
    uint32_t bits;
};

inline float bf16_value(uint16_t bits) { return __uint_as_float((uint32_t)bits << 16); }
inline uint16_t bf16_bits(float v) {
    const uint32_t bits = __float_as_uint(v);
    return v != v ? 0x7FFF : (uint16_t)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}
inline float f16_value(uint16_t bits) {
    _Float16 v;
    memcpy(&v, &bits, 2);
    return (float)v;
}
inline uint16_t f16_bits(float v) {
    const _Float16 half = (_Float16)v;
    uint16_t bits;
    memcpy(&bits, &half, 2);
    return bits;
}
inline float2 open_bf16(uint32_t v) { return {bf16_value((uint16_t)v), bf16_value((uint16_t)(v >> 16))}; }
inline uint32_t pack_bf16(float a, float b) { return bf16_bits(a) | (uint32_t)bf16_bits(b) << 16; }
inline uint32_t pack_f16(float a, float b) { return f16_bits(a) | (uint32_t)f16_bits(b) << 16; }
inline float e4m3_value(uint8_t code) {
    const int e = code >> 3 & 15, m = code & 7;
    const float size = (code & 127) == 127 ? NAN : e ? ldexpf(8 + m, e - 10) : ldexpf(m, -9);
    return code & 128 ? -size : size;
}
inline uint32_t e4m3x2(uint16_t codes) { return pack_f16(e4m3_value((uint8_t)codes), e4m3_value((uint8_t)(codes >> 8))); }
inline uint32_t times(uint32_t a, __half2 b) {
    return pack_f16(f16_value((uint16_t)a) * f16_value((uint16_t)b.bits), f16_value((uint16_t)(a >> 16)) * f16_value((uint16_t)(b.bits >> 16)));
}
inline uint32_t times_bf16(uint32_t a, uint32_t b) {
    return pack_bf16(bf16_value((uint16_t)a) * bf16_value((uint16_t)b), bf16_value((uint16_t)(a >> 16)) * bf16_value((uint16_t)(b >> 16)));
}
inline float at_least_0(float x) { return x != x ? NAN : x > 0.f ? x : 0.f; }
inline float power_of_two(float x) { return exp2f(x); }
inline float reciprocal(float x) { return 1.f / x; }
inline float rsqrtf(float x) { return 1.f / sqrtf(x); }
// Copies are made when they are waited for; until then the bytes are NaN's.
struct Copy {
    void* to;
    const void* from;
    bool is_there;
};
inline std::map<const emulator::Thread*, std::vector<Copy>> copies;
inline void copy16(void* to, const void* from, bool is_there) {
    memset(to, 0xFF, 16);
    copies[emulator::now].push_back({to, from, is_there});
}
inline void await_copies() {
    for (const Copy& copy : copies[emulator::now])
        if (copy.is_there) memcpy(copy.to, copy.from, 16);
        else memset(copy.to, 0, 16);
    copies[emulator::now].clear();
}

namespace emulator {
struct Fragments {
    uint32_t a[4], b[2];
};
template <typename F> void multiply(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, F value) {
    const Fragments mine = {{a[0], a[1], a[2], a[3]}, {b0, b1}};
    uint64_t all[32];
    together("mma", (uint64_t)&mine, all);
    const int g = now->index % 32 / 4, t = now->index % 4;
    for (int i = 0; i < 4; ++i) {
        const int row = g + i / 2 * 8, column = 2 * t + i % 2;
        double sum = d[i];
        for (int k = 0; k < 16; ++k) {
            const Fragments& of_a = *(const Fragments*)all[row % 8 * 4 + k % 8 / 2];
            const Fragments& of_b = *(const Fragments*)all[column * 4 + k % 8 / 2];
            sum += (double)value(of_a.a[row / 8 + k / 8 * 2] >> k % 2 * 16) * value(of_b.b[k / 8] >> k % 2 * 16);
        }
        d[i] = (float)sum;
    }
    __syncwarp();   // the others may still read this lane's
}
template <int N> void load_transposed(uint32_t (&r)[N], const void* row) {
    uint64_t all[32];
    together("ldmatrix", (uint64_t)row, all);
    const int g = now->index % 32 / 4, t = now->index % 4;
    for (int i = 0; i < N; ++i) {
        const auto at = [&](int j) { return ((const uint16_t*)all[8 * i + j])[g]; };
        r[i] = at(2 * t) | (uint32_t)at(2 * t + 1) << 16;
    }
    __syncwarp();
}
}  // namespace emulator
inline void multiply_f16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    emulator::multiply(d, a, b0, b1, [](uint32_t v) { return f16_value((uint16_t)v); });
}
inline void multiply_bf16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    emulator::multiply(d, a, b0, b1, [](uint32_t v) { return bf16_value((uint16_t)v); });
}
template <int N> void load_transposed(uint32_t (&r)[N], const void* row) { emulator::load_transposed(r, row); }
