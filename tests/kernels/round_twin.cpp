// kernels/common/round.cuh and quantize.cu compiled for the CPU.
#include "emulator.h"
#include "vectors.h"

#include <math.h>

#define __shared__ static   // of the one block that runs
#define __grid_constant__
#define blockDim (emulator::Index{emulator::threads_per_block})

using std::max;

inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float down(double v) {
    const float near = (float)v;
    return (double)near > v ? nextafterf(near, -INFINITY) : near;
}
// Exact in float64 where this is used: tie and half an ulp have 27 bits together, `a` has 24.
inline float __fmaf_rd(float a, float b, float c) { return down((double)a * b + c); }
inline float __fmul_rd(float a, float b) { return down((double)a * b); }
inline uint32_t __byte_perm(uint32_t a, uint32_t b, uint32_t select) {
    const uint64_t both = (uint64_t)b << 32 | a;
    uint32_t out = 0;
    for (int i = 0; i < 4; ++i) out |= (uint32_t)(both >> (select >> 4 * i & 7) * 8 & 255) << 8 * i;
    return out;
}
inline float __shfl_xor_sync(uint32_t mask, float v, int with) { return __uint_as_float(__shfl_xor_sync(mask, __float_as_uint(v), with)); }
inline float __fsqrt_rn(float v) { return sqrtf(v); }
inline float __frcp_rn(float v) { return 1.f / v; }
inline float __expf(float v) { return expf(v); }
template <typename F> uint32_t halves(uint32_t a, uint32_t b, F f) {
    return (uint32_t)f((uint16_t)(a >> 16), (uint16_t)(b >> 16)) << 16 | (uint16_t)f((uint16_t)a, (uint16_t)b);
}
inline uint32_t above(uint32_t a, uint32_t b) {
    return halves(a, b, [](uint16_t a, uint16_t b) { return __uint_as_float((uint32_t)a << 16) > __uint_as_float((uint32_t)b << 16) ? 0xFFFF : 0; });
}
inline uint32_t larger(uint32_t a, uint32_t b) { return halves(a, b, [](uint16_t a, uint16_t b) { return max(a, b); }); }
inline uint32_t smaller(uint32_t a, uint32_t b) { return halves(a, b, [](uint16_t a, uint16_t b) { return min(a, b); }); }
inline uint32_t pick(uint32_t mask, uint32_t a, uint32_t b) { return (mask & a) | (~mask & b); }
inline uint32_t bf16(float v) {
    const uint32_t bits = __float_as_uint(v);
    return v != v ? 0x7FFFu : (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
}
inline uint32_t bf16_pair(float low, float high) { return bf16(low) | bf16(high) << 16; }
// FP16 by way of float64, which holds products of two and their sum with a third exactly.
inline double f16_value(uint16_t h) {
    const int exponent = h >> 10 & 31, mantissa = h & 1023;
    const double size = exponent == 31 ? (mantissa ? NAN : INFINITY) : exponent ? ldexp(1024 + mantissa, exponent - 25) : ldexp(mantissa, -24);
    return h & 0x8000 ? -size : size;
}
inline uint16_t f16(double v) {
    const uint16_t sign = signbit(v) ? 0x8000 : 0;
    if (v != v) return 0x7FFF;
    const double size = fabs(v);
    if (size >= 65520.) return sign | 0x7C00;
    if (size == 0.) return sign;
    const int exponent = max(ilogb(size), -14);
    const int units = (int)nearbyint(ldexp(size, 10 - exponent));   // of the last place; 2048 is the next power's first
    return sign | (uint16_t)(((exponent + 14) << 10) + units);
}
inline uint32_t f16_pair(float low, float high) { return f16(low) | (uint32_t)f16(high) << 16; }
inline uint32_t minus_clamped(uint32_t a, uint32_t b) {
    return halves(a, b, [](uint16_t a, uint16_t b) {
        const double v = f16_value(a) - f16_value(b);
        return f16(v != v ? 0. : min(max(v, 0.), 1.));
    });
}
inline uint32_t times_f16(uint32_t a, uint32_t b) {
    return halves(a, b, [](uint16_t a, uint16_t b) { return f16(f16_value(a) * f16_value(b)); });
}
inline float quotient(float a, float b) { return a / b; }
inline uint32_t multiply_add(uint32_t a, uint32_t b, uint32_t c) { return a * b + c; }
inline uint32_t times_plus(uint32_t a, uint32_t b, uint32_t c) {
    const auto one = [](uint32_t a, uint32_t b, uint32_t c) { return (uint32_t)f16(f16_value(a) * f16_value(b) + f16_value(c)); };
    return one(a & 0xFFFF, b & 0xFFFF, c & 0xFFFF) | one(a >> 16, b >> 16, c >> 16) << 16;
}
// By search: larger codes of one sign are larger values.
inline float e4m3(int code) {
    const int exponent = code >> 3 & 15, mantissa = code & 7;
    return (code & 127) == 127 ? NAN : exponent ? ldexpf(8 + mantissa, exponent - 10) : ldexpf(mantissa, -9);
}
inline int e4m3_code(float v) {
    const int sign = signbit(v) ? 128 : 0;
    if (v != v) return sign | 127;
    int code = 0;
    while (code < 126 && e4m3(code + 1) <= fabsf(v)) ++code;
    if (code == 126) return sign | 126;
    const float middle = (e4m3(code) + e4m3(code + 1)) / 2;
    return sign | (code + (fabsf(v) > middle || (fabsf(v) == middle && code & 1)));
}
inline uint16_t e4m3_codes(float a, float b) { return e4m3_code(a) | e4m3_code(b) << 8; }
inline float2 e4m3_values(uint16_t codes) {
    const auto value = [](int code) { return code & 128 ? -e4m3(code & 127) : e4m3(code); };
    return {value(codes & 255), value(codes >> 8)};
}
#include "quantize.cu"

extern "C" {
// Which code x [n] has in a block whose unit is that of `units` [n].
void codes(const uint16_t* x, const float* units, int64_t n, uint8_t* out) {
    for (int64_t i = 0; i < n; ++i) out[i] = codes_of(x[i], ladder(units[i], units[i])) >> 12 & 15;
}
// What x [n], each alone in a block with that unit, is worth in a row with that scale, by way of FP16.
void halves(const uint16_t* x, const float* units, const float* scales, int64_t n, float* out) {
    for (int64_t i = 0; i < n; ++i) {
        uint32_t its[8] = {x[i], 0, 0, 0, 0, 0, 0, (uint32_t)x[i] << 16};
        const Halves row(scales[i]);
        row.round(its, units[i]);
        const uint32_t one = its[0], other = its[7];
        const bool alone = one >> 16 == 0 && (other & 0xFFFF) == 0 && other >> 16 == (one & 0xFFFF) && !(its[1] | its[2] | its[3] | its[4] | its[5] | its[6]);
        out[i] = alone && is_usual(__float_as_uint(2688.f * scales[i])) ? (float)f16_value(one) * row.undo() : NAN;
    }
}
// x [rows][width] -> all that the codec makes of it, 16 channels at a time. -> how many values are others by way of FP16.
int64_t rows(const uint32_t* x, int64_t count, int64_t width, uint32_t* codes, uint8_t* scales, float* factors, uint32_t* values) {
    int64_t wrong = 0;
    for (int64_t row = 0; row < count; ++row, x += width / 2, values += width / 2) {
        uint32_t top = 0;
        for (int64_t i = 0; i < width / 2; ++i) top = max(top, largest<1>({x[i]}));
        const float scale = factors[row] = row_scale(top);
        for (int64_t block = 0; block < width / 16; ++block) {
            uint32_t its[8];
            memcpy(its, x + block * 8, sizeof its);
            *scales = block_code(largest(its), scale);
            const Ladder by = ladder(unit_of(*scales++, scale), scale);
            *codes++ = eight_codes(its, by);
            *codes++ = eight_codes(its + 4, by);
            uint32_t again[8];
            memcpy(again, its, sizeof its);
            round_a4(its, largest(its), scale);
            memcpy(values + block * 8, its, sizeof its);
            if (!is_usual(top)) continue;
            const Halves half = Halves::of_row(top);
            half.round(again, half.unit_of_block(largest(again)));
            for (int i = 0; i < 16; ++i) {
                const float got = (float)f16_value(again[i / 2] >> i % 2 * 16) * half.undo();
                if (got != __uint_as_float(its[i / 2] >> i % 2 * 16 << 16)) ++wrong;
            }
        }
    }
    return wrong;
}
// A launch of quantize.cu, block after block.
const char* launch(const Rows* p, int blocks, int threads, int words, bool makes_codes, int source, unsigned seed) {
    void (*const kernels[3][3])(Rows) = {
        {rows_kernel<4, false, PLAIN>, rows_kernel<4, false, NORM>, rows_kernel<4, false, SWIGLU>},
        {rows_kernel<8, false, PLAIN>, rows_kernel<8, false, NORM>, rows_kernel<8, false, SWIGLU>},
        {rows_kernel<8, true, PLAIN>, rows_kernel<8, true, NORM>, rows_kernel<8, true, SWIGLU>},
    };
    const auto kernel = kernels[makes_codes ? 2 : words == 8][source];
    for (int block = 0; block < blocks; ++block) {
        const char* problem = emulator::run(block, 1, threads, 0, seed, [&] { kernel(*p); });
        if (*problem) return problem;
    }
    return "";
}
}
