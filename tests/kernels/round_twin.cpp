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
// x [rows][width] -> all that the codec makes of it, 16 channels at a time.
void rows(const uint32_t* x, int64_t count, int64_t width, uint32_t* codes, uint8_t* scales, float* factors, uint32_t* values) {
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
            round_a4(its, largest(its), scale);
            memcpy(values + block * 8, its, sizeof its);
        }
    }
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
