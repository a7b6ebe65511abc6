// gpu/fragments.cuh and what it includes, on the CPU.
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
inline float __fsqrt_rn(float a) { return sqrtf(a); }
inline uint32_t __byte_perm(uint32_t a, uint32_t b, uint32_t how) {
    const uint64_t both = (uint64_t)b << 32 | a;
    uint32_t out = 0;
    for (int i = 0; i < 4; ++i) out |= (uint32_t)(both >> 8 * (how >> 4 * i & 7) & 255) << 8 * i;
    return out;
}

inline float bf16_value(uint16_t bits) { return __uint_as_float((uint32_t)bits << 16); }
inline uint16_t bf16_bits(float v) {
    const uint32_t bits = __float_as_uint(v);
    return v != v ? 0x7FFF : (uint16_t)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}
inline float __bfloat162float(__nv_bfloat16 v) { return bf16_value(v.bits); }
inline __nv_bfloat16 __float2bfloat16_rn(float v) { return {bf16_bits(v)}; }
inline float f16_value(uint16_t bits) {
    static const std::vector<float> values = [] {
        std::vector<float> all(1 << 16);
        for (size_t i = 0; i < all.size(); ++i) {
            const uint16_t bits = (uint16_t)i;
            _Float16 v;
            memcpy(&v, &bits, 2);
            all[i] = (float)v;
        }
        return all;
    }();
    return values[bits];
}
inline uint16_t f16_bits(float v) {
    const uint32_t bits = __float_as_uint(v), exponent = bits >> 23 & 255;
    if (exponent > 112 && exponent < 143 && !(bits & 0x1FFF))
        return (uint16_t)(bits >> 16 & 0x8000 | (bits >> 13) - (112 << 10) & 0x7FFF);   // exact
    const _Float16 half = (_Float16)v;
    uint16_t out;
    memcpy(&out, &half, 2);
    return out;
}
inline float2 open_bf16(uint32_t v) { return {bf16_value((uint16_t)v), bf16_value((uint16_t)(v >> 16))}; }
inline uint32_t pack_bf16(float a, float b) { return bf16_bits(a) | (uint32_t)bf16_bits(b) << 16; }
inline uint32_t pack_f16(float a, float b) { return f16_bits(a) | (uint32_t)f16_bits(b) << 16; }
inline float e4m3_value(uint8_t code) {
    const int e = code >> 3 & 15, m = code & 7;
    const float size = (code & 127) == 127 ? NAN : e ? ldexpf(8 + m, e - 10) : ldexpf(m, -9);
    return code & 128 ? -size : size;
}
inline uint32_t e4m3x2(uint16_t codes) {
    return pack_f16(e4m3_value((uint8_t)codes), e4m3_value((uint8_t)(codes >> 8)));
}
inline uint32_t times(uint32_t a, __half2 b) {
    return pack_f16(f16_value((uint16_t)a) * f16_value((uint16_t)b.bits),
                    f16_value((uint16_t)(a >> 16)) * f16_value((uint16_t)(b.bits >> 16)));
}
inline uint32_t times_bf16(uint32_t a, uint32_t b) {
    return pack_bf16(bf16_value((uint16_t)a) * bf16_value((uint16_t)b),
                     bf16_value((uint16_t)(a >> 16)) * bf16_value((uint16_t)(b >> 16)));
}
inline float at_least_0(float x) { return x != x ? NAN : x > 0.f ? x : 0.f; }
inline float power_of_two(float x) { return exp2f(x); }
inline float reciprocal(float x) { return 1.f / x; }
inline float rsqrtf(float x) { return 1.f / sqrtf(x); }
// Copies are made when they are waited for; until then the bytes are NaN's.
struct Copy {
    void* to;
    const void* from;
    int bytes, zeros;
    const void* by;
};
inline std::map<const emulator::Thread*, std::vector<Copy>> copies;
inline void copy_some(void* to, const void* from, int bytes, int all) {
    races::touch(to, all, races::WRITE, __builtin_return_address(0));
    memset(to, 0xFF, all);
    copies[emulator::now].push_back({to, from, bytes, all - bytes, __builtin_return_address(0)});
}
inline void copy16(void* to, const void* from, bool is_there) { copy_some(to, from, is_there ? 16 : 0, 16); }
inline void complete_copies(size_t count) {   // the first of this thread
    std::vector<Copy>& all = copies[emulator::now];
    for (size_t i = 0; i < count; ++i) {
        races::touch(all[i].from, all[i].bytes, races::READ, all[i].by);
        races::touch(all[i].to, all[i].bytes + all[i].zeros, races::WRITE, all[i].by);
        memcpy(all[i].to, all[i].from, all[i].bytes);
        memset((char*)all[i].to + all[i].bytes, 0, all[i].zeros);
    }
    all.erase(all.begin(), all.begin() + count);
}
inline void await_copies() { complete_copies(copies[emulator::now].size()); }

namespace emulator {
struct Fragments {
    uint32_t a[4], b[2];
    float d[4];
};
// D += A B of a warp, each sum in float64, rounded once. Fast even where all else is compiled fast.
template <typename F> __attribute__((optimize("O3"))) void multiply_all(const uint64_t* all, F value) {
    const auto of = [&](int row, int pair) { return (Fragments*)all[row * 4 + pair]; };
    double wide_a[16][16], wide_b[16][8], sums[16][8];   // [k][row], [k][column], [row][column]
    for (int k = 0; k < 16; ++k)
        for (int i = 0; i < 8; ++i) {
            const Fragments& its = *of(i, k % 8 / 2);
            wide_a[k][i] = value(its.a[k / 8 * 2] >> k % 2 * 16);
            wide_a[k][i + 8] = value(its.a[k / 8 * 2 + 1] >> k % 2 * 16);
            wide_b[k][i] = value(its.b[k / 8] >> k % 2 * 16);
        }
    for (int row = 0; row < 16; ++row)
        for (int column = 0; column < 8; ++column)
            sums[row][column] = of(row % 8, column / 2)->d[row / 8 * 2 + column % 2];
    for (int k = 0; k < 16; ++k)
        for (int row = 0; row < 16; ++row)
            for (int column = 0; column < 8; ++column)
                sums[row][column] += wide_a[k][row] * wide_b[k][column];
    for (int row = 0; row < 16; ++row)
        for (int column = 0; column < 8; ++column)
            of(row % 8, column / 2)->d[row / 8 * 2 + column % 2] = (float)sums[row][column];
}
// The last lane to come multiplies for all.
template <typename F>
void multiply(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, F value) {
    Fragments mine = {{a[0], a[1], a[2], a[3]}, {b0, b1}, {d[0], d[1], d[2], d[3]}};
    together("mma", &mine, [&](const uint64_t* all) { multiply_all(all, value); });
    memcpy(d, mine.d, sizeof mine.d);
}
template <int N> void load_transposed(uint32_t (&r)[N], const void* row) {
    uint64_t all[32];
    together("ldmatrix", (uint64_t)row, all);
    const int g = now->index % 32 / 4, t = now->index % 4;
    for (int i = 0; i < N; ++i) {
        const auto at = [&](int j) { return ((const uint16_t*)all[8 * i + j])[g]; };
        r[i] = at(2 * t) | (uint32_t)at(2 * t + 1) << 16;
    }
    meet(my_warp().barrier, 32, NOTHING);   // nobody overtakes
}
}   // namespace emulator
inline void multiply_f16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    emulator::multiply(d, a, b0, b1, [](uint32_t v) { return f16_value((uint16_t)v); });
}
inline void multiply_bf16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    emulator::multiply(d, a, b0, b1, [](uint32_t v) { return bf16_value((uint16_t)v); });
}
template <int N> void load_transposed(uint32_t (&r)[N], const void* row) {
    emulator::load_transposed(r, row);
}
