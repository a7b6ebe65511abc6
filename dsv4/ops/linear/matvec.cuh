// Decode step: what matvec.py gives a launch of matvec.cu.
#pragma once
#include "block.cuh"
#include "mix.cuh"
#include "share.cuh"

enum { AS_ACT = 0, AS_F32 = 1 };   // what y holds; pairs always give SwiGLU in the activations' type
constexpr int MAX_SEGMENTS = 16, MAX_SHARES = 2;

struct Params {
    Segment segments[MAX_SEGMENTS];
    const int4* work;   // segment, first unit, units, task (routed) or group of eight rows; where there are
                        // shares: -, block, blocks, -
    Share shares[MAX_SHARES];
    int num_shares;
    int max_tasks;            // with shares
    const int* task_expert;   // [tasks], -1 beyond the last
    const int* task_pairs;    // [tasks][8], -1 beyond the last
    const float* weights;     // [pairs] routing weights
    int choices;              // experts per token
    int rows;                 // of the batch
    float limit;              // of the clamped SwiGLU
    int triggers_late;        // launch_dependents comes after the wait
    int stages;               // of a single row's warp, 2 or 4
    int early_stages,
        paced;           // a single row: chunks that a warp fetches before the wait; not all warps at once
    Mixing mixing;       // beside the products, where a block's work says segment -1
    uint32_t* cleared;   // largest magnitudes of rows that later launches write, zero from here on; a single
                         // row's launch
    int clears;          // so many
    const char* prefetch;   // what the next kernel reads first, prefetched to L2; may be null
    int64_t prefetch_bytes;
};
