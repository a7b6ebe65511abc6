// ops/attention/decode.cu compiled for the CPU: a cluster at a time.
#include "fragments_twin.h"

#include "attention/decode.cu"

template <int GROUPS> const char* attend(int rows, const Attention& p, unsigned seed) {
    for (int i = 0; i < rows << p.group_bits; ++i) {
        const char* problem = emulator::run(i * CLUSTER, CLUSTER, WARPS * 32, sizeof(Memory<GROUPS>), seed,
                                            [&] { attention_kernel<GROUPS>(p); });
        if (*problem) return problem;
    }
    return "";
}

extern "C" const char* attend(int rows, const void* params, unsigned seed) {
    const Attention& p = *(const Attention*)params;
    return p.heads >> p.group_bits == HEADS ? attend<1>(rows, p, seed) : attend<2>(rows, p, seed);
}
