// A hyper-connection site of a decode step in one launch: what the last site's layer gave goes into the streams, the
// streams give the mixes, the mixes the next layer's normalised input. A cluster of blocks shares a row; each keeps its
// channels of the four streams in registers and the blocks tell each other their sums.
#include <cuda_bf16.h>
#include <stdint.h>

#include "launch.cuh"

constexpr int CLUSTER = 16, THREADS = 256, WARPS = THREADS / 32, N = 4, MIXES = 2 * N + N * N;
constexpr int SQUARES = 31;   // the place of the sum of squares among 32 sums

__device__ __forceinline__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
__device__ __forceinline__ void put_in(const float* p, int block, float v) {   // to the same place in another block
    uint32_t address;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"((uint32_t)__cvta_generic_to_shared(p)), "r"(block));
    asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(address), "f"(v) : "memory");
}
__device__ __forceinline__ float as_float(float v) { return v; }
__device__ __forceinline__ float as_float(__nv_bfloat16 v) { return __bfloat162float(v); }
template <typename Act> __device__ __forceinline__ Act as_act(float v) { return (Act)v; }
template <> __device__ __forceinline__ __nv_bfloat16 as_act(float v) { return __float2bfloat16_rn(v); }
__device__ __forceinline__ float sigmoid(float v) { return 1.f / (1.f + expf(-v)); }

// 32 sums over a warp at once: lane i ends with the sum of everybody's v[i].
__device__ __forceinline__ float sum_each(float (&v)[32], int lane) {
#pragma unroll
    for (int step = 0; step < 5; ++step) {
        const int width = 16 >> step;
#pragma unroll
        for (int i = 0; i < 16; ++i) {
            if (i >= width) continue;
            const bool upper = lane & width;
            const float give = upper ? v[i] : v[i + width], keep = upper ? v[i + width] : v[i];
            v[i] = keep + __shfl_xor_sync(~0u, give, width);
        }
    }
    return v[0];
}

// Nearly doubly stochastic: rows and columns in turn; the last step normalises columns. All in one thread.
__device__ __forceinline__ void sinkhorn(float (&c)[N][N], int iters, float eps) {
#pragma unroll
    for (int j = 0; j < N; ++j) {
        const float top = fmaxf(fmaxf(c[j][0], c[j][1]), fmaxf(c[j][2], c[j][3]));
#pragma unroll
        for (int k = 0; k < N; ++k) c[j][k] = expf(c[j][k] - top);
        const float share = 1.f / ((c[j][0] + c[j][1]) + (c[j][2] + c[j][3]));
#pragma unroll
        for (int k = 0; k < N; ++k) c[j][k] = c[j][k] * share + eps;
    }
    for (int i = 0; i < iters; ++i) {
        if (i)
#pragma unroll
            for (int j = 0; j < N; ++j) {
                const float share = 1.f / ((c[j][0] + c[j][1]) + (c[j][2] + c[j][3]) + eps);
#pragma unroll
                for (int k = 0; k < N; ++k) c[j][k] *= share;
            }
#pragma unroll
        for (int k = 0; k < N; ++k) {
            const float share = 1.f / ((c[0][k] + c[1][k]) + (c[2][k] + c[3][k]) + eps);
#pragma unroll
            for (int j = 0; j < N; ++j) c[j][k] *= share;
        }
    }
}

struct Site {
    const void* y;            // [rows][parts][d], null at the first site; float32 or the compute type
    float *gate, *comb;       // [rows][4], [rows][4][4]: the last site's, then this one's
    void* streams;            // [rows][4][d]
    const float *fn, *base, *scale, *norm;   // [mixes][4][d], [mixes], [mixes], [d]
    void* x;                  // [rows][d]
    int d, parts, mixes, iters, y_is_float;
    float norm_eps, eps;
};

// EACH: channels of a thread.
template <typename Act, int EACH>
__global__ void __launch_bounds__(THREADS) site_kernel(const __grid_constant__ Site s) {
    __shared__ float of_warps[WARPS][32], of_blocks[CLUSTER][32], squares[CLUSTER], totals[32];
    const int row = blockIdx.x / CLUSTER, block = blockIdx.x % CLUSTER, tid = threadIdx.x, warp = tid >> 5, lane = tid & 31;
    const int d = s.d, span = (d + CLUSTER - 1) / CLUSTER, start = block * span, stop = min(d, start + span);
    let_next_start();
    // The first channels' part of fn is asked for before the streams are there: it depends on nothing.
    float fn[MIXES][N];
    const auto load_fn = [&](int c) {
#pragma unroll
        for (int m = 0; m < MIXES; ++m)
#pragma unroll
            for (int j = 0; j < N; ++j) fn[m][j] = c < stop && m < s.mixes ? __ldg(s.fn + (size_t)(m * N + j) * d + c) : 0.f;
    };
    load_fn(start + tid);
    wait_for_earlier();

    Act* streams = static_cast<Act*>(s.streams) + (size_t)row * N * d;
    float gate[N], comb[N][N];
    if (s.y) {
#pragma unroll
        for (int k = 0; k < N; ++k) gate[k] = __ldcg(s.gate + row * N + k);
#pragma unroll
        for (int j = 0; j < N; ++j)
#pragma unroll
            for (int k = 0; k < N; ++k) comb[j][k] = __ldcg(s.comb + (row * N + j) * N + k);
    }
    float h[EACH][N], sums[32];
#pragma unroll
    for (int i = 0; i < 32; ++i) sums[i] = 0.f;
#pragma unroll
    for (int e = 0; e < EACH; ++e) {
        const int c = start + e * THREADS + tid;
        if (e) load_fn(c);
#pragma unroll
        for (int j = 0; j < N; ++j) h[e][j] = c < stop ? as_float(streams[(size_t)j * d + c]) : 0.f;
        if (s.y && c < stop) {
            float y = 0.f;
            const size_t at = (size_t)row * s.parts * d + c;
            for (int p = 0; p < s.parts; ++p)
                y += s.y_is_float ? __ldcg(static_cast<const float*>(s.y) + at + (size_t)p * d) : as_float(static_cast<const Act*>(s.y)[at + (size_t)p * d]);
            y = as_float(as_act<Act>(y));
            float mixed[N];
#pragma unroll
            for (int k = 0; k < N; ++k) {
                mixed[k] = 0.f;
#pragma unroll
                for (int j = 0; j < N; ++j) mixed[k] += comb[j][k] * h[e][j];
            }
#pragma unroll
            for (int k = 0; k < N; ++k) {
                const Act v = as_act<Act>(gate[k] * y + mixed[k]);
                streams[(size_t)k * d + c] = v;
                h[e][k] = as_float(v);
            }
        }
#pragma unroll
        for (int j = 0; j < N; ++j) {
            sums[SQUARES] += h[e][j] * h[e][j];
#pragma unroll
            for (int m = 0; m < MIXES; ++m) sums[m] += fn[m][j] * h[e][j];
        }
    }
    of_warps[warp][lane] = sum_each(sums, lane);
    __syncthreads();
    if (warp < CLUSTER / 2) {   // two blocks to tell for each warp
        float total = 0.f;
#pragma unroll
        for (int w = 0; w < WARPS; ++w) total += of_warps[w][lane];
        for (int b = warp; b < CLUSTER; b += WARPS) put_in(&of_blocks[block][lane], b, total);
    }
    cluster_sync();
    if (warp == 0) {
        float total = 0.f;
#pragma unroll
        for (int b = 0; b < CLUSTER; ++b) total += of_blocks[b][lane];
        const float mean = __shfl_sync(~0u, total, SQUARES) * (1.f / (N * d)) + s.norm_eps;
        totals[lane] = lane < s.mixes ? total * (1.f / sqrtf(mean)) * s.scale[lane] + s.base[lane] : 0.f;
    }
    __syncthreads();
    // Block 0's last warp makes what only the next site needs, beside the norm.
    if (s.mixes == MIXES && block == 0 && warp == WARPS - 1 && lane == 0) {
        float c[N][N];
#pragma unroll
        for (int j = 0; j < N; ++j)
#pragma unroll
            for (int k = 0; k < N; ++k) c[j][k] = totals[2 * N + j * N + k];
        sinkhorn(c, s.iters, s.eps);
#pragma unroll
        for (int j = 0; j < N; ++j) {
            s.gate[row * N + j] = 2.f * sigmoid(totals[N + j]);
#pragma unroll
            for (int k = 0; k < N; ++k) s.comb[(row * N + j) * N + k] = c[j][k];
        }
    }
    __syncwarp();
    float into[N], x[EACH], square = 0.f;
#pragma unroll
    for (int j = 0; j < N; ++j) into[j] = sigmoid(totals[j]) + s.eps;
#pragma unroll
    for (int e = 0; e < EACH; ++e) {
        float v = 0.f;
#pragma unroll
        for (int j = 0; j < N; ++j) v += into[j] * h[e][j];
        x[e] = as_float(as_act<Act>(v));
        square += x[e] * x[e];
    }
    for (int i = 16; i; i >>= 1) square += __shfl_xor_sync(~0u, square, i);
    if (lane == 0) of_warps[warp][0] = square;
    __syncthreads();
    if (tid < CLUSTER) {
        float total = 0.f;
#pragma unroll
        for (int w = 0; w < WARPS; ++w) total += of_warps[w][0];
        put_in(&squares[block], tid, total);
    }
    cluster_sync();
    float total = 0.f;
#pragma unroll
    for (int b = 0; b < CLUSTER; ++b) total += squares[b];
    const float root = sqrtf(total * (1.f / d) + s.norm_eps);
#pragma unroll
    for (int e = 0; e < EACH; ++e) {
        const int c = start + e * THREADS + tid;
        if (c < stop) static_cast<Act*>(s.x)[(size_t)row * d + c] = as_act<Act>(s.norm[c] * (x[e] / root));
    }
}

template <typename Act> static int go(const Site& s, int rows, cudaStream_t stream) {
    const int each = ((s.d + CLUSTER - 1) / CLUSTER + THREADS - 1) / THREADS;
    if (each == 1) return launch(site_kernel<Act, 1>, rows * CLUSTER, THREADS, 0, CLUSTER, stream, s);
    if (each == 2) return launch(site_kernel<Act, 2>, rows * CLUSTER, THREADS, 0, CLUSTER, stream, s);
    return (int)cudaErrorInvalidValue;   // more than 8192 channels
}
extern "C" int dsv4_site(const Site* s, int rows, int is_float, cudaStream_t stream) {
    return is_float ? go<float>(*s, rows, stream) : go<__nv_bfloat16>(*s, rows, stream);
}
