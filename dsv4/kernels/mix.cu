// Hyper-connections of a decode step, one launch per site: the last output goes back into the four streams, the streams
// give the mixes, and the mixes give the next input, normalised. Replaces ops.mhc.ref and the norm after it.
//
// A block has CHANNELS channels of every stream and needs two sums over all of them. Blocks tell each other their parts
// through `board`: eight bytes at a time, the number and the launch it belongs to, so that who reads the one knows by the
// other that it is there; no fence, no counter to reset. All blocks of a launch must be resident at once (mhc.py sees to
// it); the next kernel's cannot take their place, since it starts when every block here has.
#include <cuda_bf16.h>
#include <stdint.h>

#include "launch.cuh"

constexpr int STREAMS = 4, MIXES = 2 * STREAMS + STREAMS * STREAMS, THREADS = 256, WARPS = THREADS / 32;
constexpr int CHANNELS = 64, SHARES = THREADS / CHANNELS, EACH = MIXES / SHARES;   // a thread: a channel, EACH of the mixes
constexpr int RESIDENT = 2;   // blocks that fit on a multiprocessor; mhc.py counts on it
constexpr int VALUES = 8, SHARE_WARPS = CHANNELS / 32;   // of a thread's: the mixes, then the sum of squares
constexpr int SQUARES = MIXES, NORM = MIXES + 1, WORDS = MIXES + 2;                // on the board, per row and block
static_assert(EACH * SHARES == MIXES && EACH < VALUES && SHARES == STREAMS, "threads share the mixes, and write a stream each");

struct Mix {
    const void* y;          // [rows][parts][d], the last output in parts to be summed; null: the streams stay
    int y_is_f32, parts;
    void* streams;          // [rows][STREAMS][d]
    const float* fn;        // [mixes][STREAMS][d]
    const float* base;      // [mixes]
    const float* scale;     // [mixes]
    const float* weight;    // [d] of the norm
    float* gate;            // [rows][STREAMS]: of the last output, then of the next
    float* comb;            // [rows][STREAMS][STREAMS]: likewise
    void* x;                // [rows][d]
    unsigned long long* board;   // [rows][WORDS][chunks]
    uint32_t* launches;     // [blocks] how often each has run
    int mixes, d, chunks, rows, groups, iters;   // a group of blocks takes every groups-th row
    float norm_eps, hc_eps;
};

__device__ __forceinline__ void tell(unsigned long long* to, float v, uint32_t launch) {
    const unsigned long long word = (unsigned long long)launch << 32 | __float_as_uint(v);
    asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(to), "l"(word) : "memory");
}

// COUNT sums over all blocks, board rows first, first + 1, ...: each in every lane of the warp, in one order of additions.
template <int COUNT>
__device__ __forceinline__ void gather(const unsigned long long* board, int chunks, uint32_t launch, int lane, float (&sums)[COUNT]) {
#pragma unroll
    for (int v = 0; v < COUNT; ++v) sums[v] = 0.f;
    for (int first = 0; first < chunks; first += 32) {
        unsigned long long word[COUNT];
        const bool mine = first + lane < chunks;
        bool waiting = true;
        while (__any_sync(~0u, waiting)) {
            waiting = false;
#pragma unroll
            for (int v = 0; v < COUNT; ++v)
                if (mine) {
                    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(word[v]) : "l"(board + (size_t)v * chunks + first + lane) : "memory");
                    waiting |= (uint32_t)(word[v] >> 32) != launch;
                }
        }
#pragma unroll
        for (int v = 0; v < COUNT; ++v) sums[v] += mine ? __uint_as_float((uint32_t)word[v]) : 0.f;
    }
#pragma unroll
    for (int i = 16; i; i >>= 1)
#pragma unroll
        for (int v = 0; v < COUNT; ++v) sums[v] += __shfl_xor_sync(~0u, sums[v], i);
}

template <typename Act> __device__ __forceinline__ float as_float(Act v);
template <> __device__ __forceinline__ float as_float(float v) { return v; }
template <> __device__ __forceinline__ float as_float(__nv_bfloat16 v) { return __bfloat162float(v); }
template <typename Act> __device__ __forceinline__ Act as_act(float v);
template <> __device__ __forceinline__ float as_act(float v) { return v; }
template <> __device__ __forceinline__ __nv_bfloat16 as_act(float v) { return __float2bfloat16_rn(v); }
// What another kernel wrote: never from L1, and an order that the compiler keeps.
template <typename Act> __device__ __forceinline__ float fresh(const Act* p);
template <> __device__ __forceinline__ float fresh(const float* p) { return __ldcg(p); }
template <> __device__ __forceinline__ float fresh(const __nv_bfloat16* p) {
    return __bfloat162float(__ushort_as_bfloat16(__ldcg(reinterpret_cast<const unsigned short*>(p))));
}
__device__ __forceinline__ float share_of(float logit) { return __fdiv_rn(1.f, 1.f + expf(-logit)); }
// The root of the mean square.
__device__ __forceinline__ float size_of(float squares, float count, float eps) { return __fsqrt_rn(squares * (1.f / count) + eps); }

// Four numbers divided by their sum.
__device__ __forceinline__ void even(float& a, float& b, float& c, float& d, float eps) {
    const float share = __fdividef(1.f, (a + b) + (c + d) + eps);
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

// The block beside the others: gate and comb of the next output, while they make its input. A warp takes a row.
__device__ __forceinline__ void next_mixes(const Mix& p, uint32_t launch, int group, int warp, int lane) {
    for (int row = group + warp * p.groups; row < p.rows; row += WARPS * p.groups) {
        float sums[STREAMS * STREAMS + STREAMS + 1];
        gather(p.board + ((size_t)row * WORDS + STREAMS) * p.chunks, p.chunks, launch, lane, sums);
        const float inv = __fdiv_rn(1.f, size_of(sums[STREAMS * STREAMS + STREAMS], (float)STREAMS * p.d, p.norm_eps));
        float m[STREAMS][STREAMS];
#pragma unroll
        for (int i = 0; i < STREAMS * STREAMS; ++i)
            m[i / STREAMS][i % STREAMS] = sums[STREAMS + i] * inv * __ldg(p.scale + 2 * STREAMS + i) + __ldg(p.base + 2 * STREAMS + i);
        sinkhorn(m, p.iters, p.hc_eps);
        if (lane) continue;
#pragma unroll
        for (int n = 0; n < STREAMS; ++n) {
            p.gate[row * STREAMS + n] = 2.f * share_of(sums[n] * inv * __ldg(p.scale + STREAMS + n) + __ldg(p.base + STREAMS + n));
#pragma unroll
            for (int c = 0; c < STREAMS; ++c) p.comb[(row * STREAMS + n) * STREAMS + c] = m[n][c];
        }
    }
}

// MANY: the most rows of a block.
template <typename Act, int MANY>
__global__ void __launch_bounds__(THREADS, RESIDENT) mix_kernel(const __grid_constant__ Mix p) {
    __shared__ float parts[2][WARPS][VALUES], squares[MANY][SHARE_WARPS];
    const int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31;
    const int per = p.chunks + 1, chunk = blockIdx.x % per, group = blockIdx.x / per;
    const int share = tid / CHANNELS, c = chunk * CHANNELS + tid % CHANNELS;
    const bool beside = chunk == p.chunks, inside = c < p.d && !beside;
    float fn[STREAMS][EACH], into_scale[STREAMS], into_base[STREAMS];
#pragma unroll
    for (int n = 0; n < STREAMS; ++n) {
        into_scale[n] = __ldg(p.scale + n);
        into_base[n] = __ldg(p.base + n);
#pragma unroll
        for (int m = 0; m < EACH; ++m)
            fn[n][m] = inside && share * EACH + m < p.mixes ? __ldg(p.fn + ((size_t)(share * EACH + m) * STREAMS + n) * p.d + c) : 0.f;
    }
    const float weight = inside ? __ldg(p.weight + c) : 0.f;
    let_next_start();
    wait_for_earlier();
    uint32_t* const runs = p.launches + blockIdx.x;
    uint32_t launch;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(launch) : "l"(runs) : "memory");
    ++launch;

    if (beside) {
        if (p.mixes == MIXES) next_mixes(p, launch, group, warp, lane);
        __syncthreads();
        if (tid == 0) *runs = launch;
        return;
    }
    Act* const streams = static_cast<Act*>(p.streams);
    float now[MANY][STREAMS];
#pragma unroll
    for (int i = 0; i < MANY; ++i) {
        const int row = group + i * p.groups;
        if (row >= p.rows) break;
        Act* const at = streams + (size_t)row * STREAMS * p.d + c;
        float old[STREAMS], v[VALUES] = {};
#pragma unroll
        for (int n = 0; n < STREAMS; ++n) now[i][n] = old[n] = inside ? fresh(at + n * p.d) : 0.f;
        if (p.y) {
            float y = 0.f;
            const size_t from = (size_t)row * p.parts * p.d + c;
            if (inside) {
#pragma unroll 8
                for (int part = 0; part < p.parts; ++part)
                    y += p.y_is_f32 ? fresh(static_cast<const float*>(p.y) + from + (size_t)part * p.d)
                                    : fresh(static_cast<const Act*>(p.y) + from + (size_t)part * p.d);
            }
            y = as_float(as_act<Act>(y));
            const float4 gate = __ldcg(reinterpret_cast<const float4*>(p.gate) + row);
            float4 mixed = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
            for (int j = 0; j < STREAMS; ++j) {
                const float4 k = __ldcg(reinterpret_cast<const float4*>(p.comb) + row * STREAMS + j);
                mixed.x += k.x * old[j]; mixed.y += k.y * old[j]; mixed.z += k.z * old[j]; mixed.w += k.w * old[j];
            }
            now[i][0] = as_float(as_act<Act>(gate.x * y + mixed.x));
            now[i][1] = as_float(as_act<Act>(gate.y * y + mixed.y));
            now[i][2] = as_float(as_act<Act>(gate.z * y + mixed.z));
            now[i][3] = as_float(as_act<Act>(gate.w * y + mixed.w));
        }
#pragma unroll
        for (int n = 0; n < STREAMS; ++n) {
#pragma unroll
            for (int m = 0; m < EACH; ++m) v[m] += fn[n][m] * now[i][n];
            v[EACH] += now[i][n] * now[i][n];
        }
        // Each step halves the values that a lane holds and doubles the lanes that each is summed over.
#pragma unroll
        for (int i2 = 16, have = VALUES; i2; i2 >>= 1) {
            if (have > 1) {
                have >>= 1;
#pragma unroll
                for (int k = 0; k < have; ++k) {
                    const bool upper = lane & i2;
                    const float give = upper ? v[k] : v[k + have];
                    v[k] = (upper ? v[k + have] : v[k]) + __shfl_xor_sync(~0u, give, i2);
                }
            } else v[0] += __shfl_xor_sync(~0u, v[0], i2);
        }
        if ((lane & 3) == 0) parts[i & 1][warp][lane >> 2] = v[0];
        __syncthreads();   // and every thread has read the streams
#pragma unroll
        for (int n = 0; n < STREAMS; ++n)
            if (p.y && inside && n == share) at[n * p.d] = as_act<Act>(now[i][n]);
        if (tid <= MIXES) {
            const int of = tid == MIXES ? 0 : tid / EACH, value = tid == MIXES ? EACH : tid % EACH;
            float total = 0.f;
#pragma unroll
            for (int w = 0; w < SHARE_WARPS; ++w) total += parts[i & 1][of * SHARE_WARPS + w][value];
            tell(p.board + ((size_t)row * WORDS + tid) * p.chunks + chunk, total, launch);
        }
    }
    float x[MANY];
#pragma unroll
    for (int i = 0; i < MANY; ++i) {
        const int row = group + i * p.groups;
        if (row >= p.rows) break;
        const unsigned long long* board = p.board + (size_t)row * WORDS * p.chunks;
        float all[1], sums[STREAMS];
        gather(board + (size_t)SQUARES * p.chunks, p.chunks, launch, lane, all);
        gather(board, p.chunks, launch, lane, sums);
        const float inv = __fdiv_rn(1.f, size_of(all[0], (float)STREAMS * p.d, p.norm_eps));
        x[i] = 0.f;
#pragma unroll
        for (int n = 0; n < STREAMS; ++n) x[i] += (share_of(sums[n] * inv * into_scale[n] + into_base[n]) + p.hc_eps) * now[i][n];
        x[i] = as_float(as_act<Act>(x[i]));
        float square = x[i] * x[i];
        for (int k = 16; k; k >>= 1) square += __shfl_xor_sync(~0u, square, k);
        if (share == 0 && lane == 0) squares[i][warp] = square;
    }
    __syncthreads();
    if (share) return;
    if (tid < MANY && group + tid * p.groups < p.rows) {
        float total = 0.f;
#pragma unroll
        for (int w = 0; w < SHARE_WARPS; ++w) total += squares[tid][w];
        tell(p.board + ((size_t)(group + tid * p.groups) * WORDS + NORM) * p.chunks + chunk, total, launch);
    }
#pragma unroll
    for (int i = 0; i < MANY; ++i) {
        const int row = group + i * p.groups;
        if (row >= p.rows) break;
        float all[1];
        gather(p.board + ((size_t)row * WORDS + NORM) * p.chunks, p.chunks, launch, lane, all);
        const float normed = weight * __fdiv_rn(x[i], size_of(all[0], (float)p.d, p.norm_eps));
        if (inside) static_cast<Act*>(p.x)[(size_t)row * p.d + c] = as_act<Act>(normed);
    }
    if (tid == 0) *runs = launch;
}

template <typename Act> static int go(const Mix& p, cudaStream_t stream) {
    const int blocks = (p.chunks + 1) * p.groups, many = (p.rows + p.groups - 1) / p.groups;
    const auto with = [&](auto kernel) { return launch(kernel, blocks, THREADS, 0, 1, stream, p); };
    if (many <= 1) return with(mix_kernel<Act, 1>);
    if (many <= 2) return with(mix_kernel<Act, 2>);
    if (many <= 4) return with(mix_kernel<Act, 4>);
    if (many <= 8) return with(mix_kernel<Act, 8>);
    if (many <= 16) return with(mix_kernel<Act, 16>);
    return (int)cudaErrorInvalidConfiguration;
}

extern "C" int dsv4_mix(const Mix* p, int is_f32, cudaStream_t stream) {
    return is_f32 ? go<float>(*p, stream) : go<__nv_bfloat16>(*p, stream);
}
