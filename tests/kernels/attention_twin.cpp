// kernels/decode/attention.cu compiled for the CPU: a cluster at a time.
#include "fragments_twin.h"

#include "attention.cu"

extern "C" const char* attend(int rows, const void* params, unsigned seed) {
    const Attention& p = *(const Attention*)params;
    for (int i = 0; i < rows * p.heads / HEADS; ++i) {
        const char* problem = emulator::run(i * CLUSTER, CLUSTER, WARPS * 32, sizeof(Memory), seed, [&] { attention_kernel(p); });
        if (*problem) return problem;
    }
    return "";
}
