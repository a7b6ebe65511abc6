// ops/index/decode.cu compiled for the CPU, a block at a time.
#include "fragments_twin.h"
#include "round_twin.h"

#include "index/decode.cu"

template <typename F> const char* run(int blocks, size_t shared, unsigned seed, F kernel) {
    for (int i = 0; i < blocks; ++i) {
        const char* problem = emulator::run(i, 1, WARPS * 32, shared, seed + i, kernel);
        if (*problem) return problem;
    }
    return "";
}

extern "C" const char* queries(const void* params, int blocks, unsigned seed) {
    return run(blocks, 0, seed, [&] { queries_kernel(*(const Queries*)params); });
}
extern "C" const char* scores(const void* params, int blocks, unsigned seed) {
    return run(blocks, sizeof(Many), seed, [&] { scores_kernel(*(const Scores*)params); });
}
