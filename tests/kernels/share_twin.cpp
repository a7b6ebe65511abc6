// ops/linear/share.cuh compiled for the CPU.
#include "vectors.h"
#include "emulator.h"
#include "share.cuh"

extern "C" int pieces(const Share* shares, int count, int tasks, int block, int blocks, int4* out) {
    Part part(shares, count, tasks, block, blocks);
    int found = 0;
    for (int4 work = part.next(shares, count, tasks); work.x >= 0; work = part.next(shares, count, tasks))
        out[found++] = work;
    return found;
}
