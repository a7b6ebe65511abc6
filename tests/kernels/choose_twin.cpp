// ops/index/decode_select.cu compiled for the CPU.
#include "emulator.h"
#include "vectors.h"
#include "index/decode_select.cu"

template <int WARPS, int KEYS> const char* few(const Choice& p, int row, int shared, unsigned seed) {
    return emulator::run(row, 1, 32 * WARPS, shared, seed, [&] { select_few_kernel<WARPS, KEYS>(p); });
}

// A row; a launch of few entries, by the warps of a block, or of many (0).
extern "C" const char* launch(const void* params, int row, int warps, int shared, unsigned seed) {
    const Choice& p = *(const Choice*)params;
    if (warps == 16) return few<16, 4>(p, row, shared, seed);
    if (warps == 32) return few<32, 8>(p, row, shared, seed);
    return emulator::run(row * CLUSTER, CLUSTER, THREADS, shared, seed,
                         [&] { p.fewest ? select_many_kernel<false>(p) : select_many_kernel<true>(p); });
}
