// Decode step: Sinkhorn's rounds over the four streams' mixing matrices of a step. They take longer than any
// kernel between two products and are wanted much later, so a block of matvec.cu does them beside its
// products.
#pragma once
#include "fragments.cuh"

constexpr int STREAMS = 4;

struct Mixing {
    float* comb;   // [rows][4][4]: in, what decode_mix.cu left; out, mhc.sinkhorn
    int iters;
    float eps;
};

// Four numbers divided by their sum, which is no denormal.
__device__ __forceinline__ void even(float& a, float& b, float& c, float& d, float eps) {
    const float share = reciprocal((a + b) + (c + (d + eps)));
    a *= share;
    b *= share;
    c *= share;
    d *= share;
}

// A thread is a row; all that its sums need is its own.
__device__ __forceinline__ void mix(const Mixing& p, int rows) {
    if (threadIdx.x >= rows) return;
    float4* comb = reinterpret_cast<float4*>(p.comb) + threadIdx.x * STREAMS;
    float4 m[STREAMS];
#pragma unroll
    for (int r = 0; r < STREAMS; ++r) m[r] = __ldcg(comb + r);
    for (int i = 0; i < p.iters; ++i) {
        if (i)   // the first time the rows are even
#pragma unroll
            for (int r = 0; r < STREAMS; ++r) even(m[r].x, m[r].y, m[r].z, m[r].w, p.eps);
        even(m[0].x, m[1].x, m[2].x, m[3].x, p.eps);
        even(m[0].y, m[1].y, m[2].y, m[3].y, p.eps);
        even(m[0].z, m[1].z, m[2].z, m[3].z, p.eps);
        even(m[0].w, m[1].w, m[2].w, m[3].w, p.eps);
    }
#pragma unroll
    for (int r = 0; r < STREAMS; ++r) comb[r] = m[r];
}
