// What the streams' sums with `fn` say of a row's next output: its share of each stream, and how the streams mix then.
// For a block of matvec.cu beside the products: the answer is wanted when those are done, and takes longer than any kernel
// between them.
#pragma once
#include "launch.cuh"

constexpr int STREAMS = 4, WIDTH = 32, SQUARES = STREAMS;   // columns of `partial`: 4 mixes, the sum of squares, the other 20
constexpr int SUM_GROUPS = 8;                               // a row's chunks are added up in so many groups

struct Mixing {
    const float* partial;   // [rows][chunks][WIDTH]
    const float* base;      // [24]
    const float* scale;     // [24]
    float* gate;            // [rows][4]
    float* comb;            // [rows][4][4]
    int chunks, d, iters;
    float norm_eps, hc_eps;
};

// One over the root of the mean square of `count` numbers.
__device__ __forceinline__ float inverse_size(float squares, int count, float eps) {
    return __fdiv_rn(1.f, __fsqrt_rn(__fdiv_rn(squares, (float)count) + eps));
}
__device__ __forceinline__ float sigmoid(float v) { return __fdiv_rn(1.f, 1.f + expf(-v)); }

// Four numbers divided by their sum, which is no denormal. Forty of these in a row are what takes the time.
__device__ __forceinline__ void even(float& a, float& b, float& c, float& d, float eps) {
    float share;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(share) : "f"((a + b) + (c + (d + eps))));
    a *= share; b *= share; c *= share; d *= share;
}

// mhc.sinkhorn within one thread.
__device__ __forceinline__ void sinkhorn(float (&m)[STREAMS][STREAMS], int iters, float eps) {
#pragma unroll
    for (int r = 0; r < STREAMS; ++r) {
        const float top = fmaxf(fmaxf(m[r][0], m[r][1]), fmaxf(m[r][2], m[r][3]));
#pragma unroll
        for (int c = 0; c < STREAMS; ++c) m[r][c] = expf(m[r][c] - top);
        even(m[r][0], m[r][1], m[r][2], m[r][3], 0.f);
#pragma unroll
        for (int c = 0; c < STREAMS; ++c) m[r][c] += eps;
    }
    for (int i = 0; i < iters; ++i) {
        if (i)
#pragma unroll
            for (int r = 0; r < STREAMS; ++r) even(m[r][0], m[r][1], m[r][2], m[r][3], eps);
#pragma unroll
        for (int c = 0; c < STREAMS; ++c) even(m[0][c], m[1][c], m[2][c], m[3][c], eps);
    }
}

// Bytes of shared memory for `rows`.
constexpr int mixing_bytes(int rows) { return rows * (SUM_GROUPS * WIDTH + WIDTH + 1) * 4; }

template <int WARPS> __device__ __forceinline__ void mix(const Mixing& p, int rows, float* shared) {
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, group = warp % SUM_GROUPS;
    const int number = lane < SQUARES ? lane : lane - 1;   // of this column's mix
    const bool is_mix = lane != SQUARES && number < 2 * STREAMS + STREAMS * STREAMS;
    const float scale = is_mix ? __ldg(p.scale + number) : 0.f, base = is_mix ? __ldg(p.base + number) : 0.f;
    float (*sums)[SUM_GROUPS][WIDTH] = reinterpret_cast<float (*)[SUM_GROUPS][WIDTH]>(shared);
    float (*logits)[WIDTH + 1] = reinterpret_cast<float (*)[WIDTH + 1]>(shared + rows * SUM_GROUPS * WIDTH);
    wait_for_earlier();
    for (int row = warp / SUM_GROUPS; row < rows; row += WARPS / SUM_GROUPS) {
        const float* from = p.partial + (size_t)row * p.chunks * WIDTH + lane;
        float total = 0.f;
        for (int first = group; first < p.chunks; first += 16 * SUM_GROUPS) {
            float v[16];
#pragma unroll
            for (int i = 0; i < 16; ++i) {
                const int chunk = first + i * SUM_GROUPS;
                v[i] = chunk < p.chunks && (is_mix || lane == SQUARES) ? __ldcg(from + (size_t)chunk * WIDTH) : 0.f;
            }
#pragma unroll
            for (int i = 0; i < 16; ++i) total += v[i];
        }
        sums[row][group][lane] = total;
    }
    __syncthreads();
    for (int row = warp; row < rows; row += WARPS) {
        float total = 0.f;
#pragma unroll
        for (int g = 0; g < SUM_GROUPS; ++g) total += sums[row][g][lane];
        const float inv = inverse_size(__shfl_sync(~0u, total, SQUARES), STREAMS * p.d, p.norm_eps);
        const float logit = total * inv * scale + base;
        logits[row][lane] = logit;
        if (lane > SQUARES && lane <= SQUARES + STREAMS) p.gate[row * STREAMS + lane - SQUARES - 1] = 2.f * sigmoid(logit);
    }
    __syncthreads();
    if (threadIdx.x >= rows) return;   // a thread is a row
    float m[STREAMS][STREAMS];
#pragma unroll
    for (int i = 0; i < STREAMS * STREAMS; ++i) m[i / STREAMS][i % STREAMS] = logits[threadIdx.x][2 * STREAMS + 1 + i];
    sinkhorn(m, p.iters, p.hc_eps);
#pragma unroll
    for (int r = 0; r < STREAMS; ++r)
        reinterpret_cast<float4*>(p.comb)[threadIdx.x * STREAMS + r] = make_float4(m[r][0], m[r][1], m[r][2], m[r][3]);
}
