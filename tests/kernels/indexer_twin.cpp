// kernels/decode/indexer.cu compiled for the CPU: a cluster at a time.
#include "fragments_twin.h"

#include "indexer.cu"

extern "C" {
const char* choose(int keys, int rows, const void* params, unsigned seed) {
    const Indexing& p = *(const Indexing*)params;
    for (int row = 0; row < rows; ++row) {
        const char* problem =
            keys == 5 ? emulator::run(row * CLUSTER, CLUSTER, WARPS * 32, sizeof(Memory<5>), seed, [&] { indexer_kernel<5>(p); })
                      : emulator::run(row * CLUSTER, CLUSTER, WARPS * 32, sizeof(Memory<16>), seed, [&] { indexer_kernel<16>(p); });
        if (*problem) return problem;
    }
    return "";
}
int memory_bytes(int keys) { return keys == 5 ? sizeof(Memory<5>) : keys == 16 ? sizeof(Memory<16>) : sizeof(Memory<32>); }
}
