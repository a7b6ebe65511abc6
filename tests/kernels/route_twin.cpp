// ops/route/decode.cu compiled for the CPU.
#include <math.h>

#include "emulator.h"
#include "route/decode.cu"

template <int MANY, bool SINGLE> const char* route(const Routing& p, unsigned seed) {
    const int threads = 32 * (SINGLE ? MANY : WARPS);
    return emulator::run(0, SINGLE ? 1 : CLUSTER, threads, sizeof(Memory<MANY, SINGLE>), seed,
                         [&] { route_kernel<MANY, SINGLE>(p); });
}

extern "C" const char* launch(const void* params, unsigned seed) {
    const Routing& p = *(const Routing*)params;
    if (p.experts <= 256) return p.rows == 1 ? route<8, true>(p, seed) : route<8, false>(p, seed);
    return p.rows == 1 ? route<16, true>(p, seed) : route<16, false>(p, seed);
}
