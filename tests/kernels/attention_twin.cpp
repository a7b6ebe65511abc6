// kernels/decode/attention.cu compiled for the CPU: a cluster at a time.
#include "fragments_twin.h"

#include "attention.cu"

extern "C" {
const char* attend(int tiles, int rows, const void* params, unsigned seed) {
    const Attention& p = *(const Attention*)params;
    const int clusters = rows * p.heads / (HEADS * tiles);
    for (int i = 0; i < clusters; ++i) {
        const char* problem =
            tiles == 1 ? emulator::run(i * CLUSTER, CLUSTER, WARPS * 32, sizeof(Memory<1>), seed, [&] { attention_kernel<1>(p); })
                       : emulator::run(i * CLUSTER, CLUSTER, WARPS * 32, sizeof(Memory<2>), seed, [&] { attention_kernel<2>(p); });
        if (*problem) return problem;
    }
    return "";
}
int memory_bytes(int tiles) { return tiles == 1 ? sizeof(Memory<1>) : sizeof(Memory<2>); }
}
