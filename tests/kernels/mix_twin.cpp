// ops/mhc/decode_mix.cu compiled for the CPU, a block at a time.
#include "round_twin.h"

inline float __fdividef(float a, float b) { return a / b; }

#include "mhc/decode_mix.cu"

// Blocks as their launcher asks for them, each beside noise where what launches before this one write is
// still missing.
extern "C" const char* launch(const void* params, bool is_wide, int blocks, unsigned seed) {
    for (int i = 0; i < blocks; ++i) {
        const auto kernel = [&] {
            is_wide ? close_kernel(*(const Closing<float>*)params)
                    : close_kernel(*(const Closing<__nv_bfloat16>*)params);
        };
        const char* problem = emulator::run(i, 1, THREADS, 0, seed + i, kernel);
        if (*problem) return problem;
    }
    return "";
}
