// ops/linear/prefill_sm90_16.cuh compiled for the CPU, in every format.
// What switches between threads is compiled to be fast, the kernels to be compiled fast.
#pragma GCC push_options
#pragma GCC optimize("O2")
#include "prompt_twin.h"
#pragma GCC pop_options

inline uint32_t transposed(uint32_t v) {
    uint32_t all[32];
    emulator::together("movmatrix", v, all);
    const int g = emulator::now->index % 32 / 4, t = emulator::now->index % 4;
    const auto at = [&](int row) { return all[row * 4 + g / 2] >> g % 2 * 16 & 0xFFFF; };
    return at(2 * t) | at(2 * t + 1) << 16;
}

#include "prefill_sm90_16.cuh"

// Weights are older than any launch: who fetches them does not wait.
LAUNCH(emulator::all_wait = false; CASE("product_kernel<0, false>", (product_kernel<NVFP4, false>), Product)
           CASE("product_kernel<0, true>", (product_kernel<NVFP4, true>), Product)
               CASE("product_kernel<1, false>", (product_kernel<MXFP4, false>), Product)
                   CASE("product_kernel<1, true>", (product_kernel<MXFP4, true>), Product)
                       CASE("product_kernel<2, false>", (product_kernel<FP8, false>), Product)
                           CASE("product_kernel<2, true>", (product_kernel<FP8, true>), Product)
                               CASE("product_kernel<3, false>", (product_kernel<BF16, false>), Product)
                                   CASE("product_kernel<3, true>", (product_kernel<BF16, true>), Product))
