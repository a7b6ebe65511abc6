// gpu/round.cuh and quantize.cu compiled for the CPU.
#include "round_twin.h"

#define __grid_constant__
#define blockDim (emulator::Index{emulator::threads_per_block})

#include "rows/quantize.cu"

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
        const bool alone = one >> 16 == 0 && (other & 0xFFFF) == 0 && other >> 16 == (one & 0xFFFF) &&
                           !(its[1] | its[2] | its[3] | its[4] | its[5] | its[6]);
        out[i] = alone && is_usual(__float_as_uint(2688.f * scales[i])) ? (float)f16_value(one) * row.undo()
                                                                        : NAN;
    }
}
// x [rows][width] -> all that the codec makes of it, 16 channels at a time. -> how many values are others by
// way of FP16.
int64_t rows(const uint32_t* x, int64_t count, int64_t width, uint32_t* codes, uint8_t* scales,
             float* factors, uint32_t* values) {
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
const char* launch(const Rows* p, int blocks, int threads, int words, bool makes_codes, int source,
                   unsigned seed) {
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
