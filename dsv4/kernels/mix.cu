// Hyper-connections of a decode step, one launch per site: the last output goes back into the four streams, the streams
// give the mixes, and the mixes give the next input, normalised. Replaces ops.mhc.ref and the norm after it.
//
// A block has CHANNELS channels of every stream and needs sums over all of them. Blocks tell each other their parts through
// `board`: eight bytes at a time, the number and the launch it belongs to, so that who reads the one knows by the other that
// it is there; no fence, no counter to reset. All blocks of a launch must be resident at once (mhc.py sees to it); the next
// kernel's cannot take their place, since it starts when every block here has.
//
// What weights the last output, Sinkhorn's matrix above all, is made of the last site's logits before this launch has to wait
// for the output. That is allowed because a product lies between the two that lets its successor start only after it has
// itself waited: the last site is over when this launch begins.
//
// The size of the input x = sum over n of w[n] s[n] follows from the streams' products with each other, w[n] w[m] (s[n] s[m]),
// which are summed along with the mixes. Where the streams cancel so far that this would lose digits, x is measured itself.
#include <cuda_bf16.h>
#include <stdint.h>

#include "launch.cuh"

constexpr int STREAMS = 4, MIXES = 2 * STREAMS + STREAMS * STREAMS, THREADS = 256, WARPS = THREADS / 32;
constexpr int CHANNELS = 64, SHARES = THREADS / CHANNELS, EACH = MIXES / SHARES;   // a thread: a channel, EACH of the mixes
constexpr int RESIDENT = 2;   // blocks that fit on a multiprocessor; mhc.py counts on it
constexpr int PAIRS = STREAMS * (STREAMS + 1) / 2, UNEQUAL = PAIRS - STREAMS;   // of streams: unequal ones first, then squares
constexpr int VALUES = 16, SHARE_WARPS = CHANNELS / 32;   // of a thread, at most: its mixes, then its pairs of streams
constexpr int MAX_PARTS = 8;
constexpr float CANCELS = 4.f;   // so much smaller than its parts apart may x's square be
__host__ __device__ constexpr int pair_of(int n, int m) { return n * (2 * STREAMS - n - 1) / 2 + m - n - 1; }   // n < m
// On the board, per row and block: pairs, mixes, and the sum of squares of x.
constexpr int FIRST_MIX = PAIRS, NORM = PAIRS + MIXES, WORDS = NORM + 1;
constexpr int KNOWN = PAIRS + STREAMS;   // the first of them are what x takes
static_assert(EACH * SHARES == MIXES && EACH + (PAIRS + SHARES - 1) / SHARES <= VALUES && SHARES == STREAMS, "threads share the mixes, and write the streams");

struct Mix {
    const void* y;          // [rows][parts][d], the last output in parts to be summed; null: the streams stay
    int y_is_f32, parts;
    void* streams;          // [rows][STREAMS][d]
    const float* fn;        // [mixes][STREAMS][d]
    const float* base;      // [mixes]
    const float* scale;     // [mixes]
    const float* weight;    // [d] of the norm
    float* logits;          // [rows][MIXES]: of the last site, then of this one
    void* x;                // [rows][d]
    unsigned long long* board;   // [rows][WORDS][chunks]
    uint32_t* launches;     // [blocks] the number of each one's next launch, from 1 on
    int mixes, d, chunks, rows, groups, iters;   // a group of blocks takes every groups-th row
    float norm_eps, hc_eps;
};


__device__ __forceinline__ void tell(unsigned long long* to, float v, uint32_t launch) {
    const unsigned long long word = (unsigned long long)launch << 32 | __float_as_uint(v);
    asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(to), "l"(word) : "memory");
}

// Sums over all blocks of COUNT numbers, `apart` rows of the board from each other: in every lane of the warp, in one order
// of additions. `count` of them are wanted.
template <int COUNT>
__device__ __forceinline__ void gather(const unsigned long long* board, int apart, int count, int chunks, uint32_t launch, int lane,
                                       float (&sums)[COUNT]) {
#pragma unroll
    for (int v = 0; v < COUNT; ++v) sums[v] = 0.f;
    for (int first = lane; first < chunks; first += 64) {
        unsigned long long word[COUNT][2];
        const bool two = first + 32 < chunks;
        bool waits;
        do {   // all are asked for before the first is looked at
            waits = false;
#pragma unroll
            for (int v = 0; v < COUNT; ++v) {
                const unsigned long long* at = board + (size_t)(v < count ? v : 0) * apart * chunks + first;
                asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(word[v][0]) : "l"(at) : "memory");
                asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(word[v][1]) : "l"(at + (two ? 32 : 0)) : "memory");
            }
#pragma unroll
            for (int v = 0; v < COUNT; ++v) waits |= (uint32_t)(word[v][0] >> 32) != launch || (uint32_t)(word[v][1] >> 32) != launch;
        } while (waits);
#pragma unroll
        for (int v = 0; v < COUNT; ++v)
            sums[v] += __uint_as_float((uint32_t)word[v][0]) + (two ? __uint_as_float((uint32_t)word[v][1]) : 0.f);
    }
    __syncwarp();
#pragma unroll
    for (int i = 16; i; i >>= 1)
#pragma unroll
        for (int v = 0; v < COUNT; ++v) sums[v] += __shfl_xor_sync(~0u, sums[v], i);
}
__device__ __forceinline__ float gather(const unsigned long long* board, int chunks, uint32_t launch, int lane) {
    float sum[1];
    gather(board, 0, 1, chunks, launch, lane, sum);
    return sum[0];
}

template <typename Act> __device__ __forceinline__ float as_float(Act v);
template <> __device__ __forceinline__ float as_float(float v) { return v; }
template <> __device__ __forceinline__ float as_float(__nv_bfloat16 v) { return __bfloat162float(v); }
template <typename Act> __device__ __forceinline__ Act as_act(float v);
template <> __device__ __forceinline__ float as_act(float v) { return v; }
template <> __device__ __forceinline__ __nv_bfloat16 as_act(float v) { return __float2bfloat16_rn(v); }
// What another kernel wrote: never from L1, and an order that the compiler keeps.
__device__ __forceinline__ float fresh(const float* p) { return __ldcg(p); }
__device__ __forceinline__ __nv_bfloat16 fresh(const __nv_bfloat16* p) {
    return __ushort_as_bfloat16(__ldcg(reinterpret_cast<const unsigned short*>(p)));
}
template <typename T> __device__ __forceinline__ float sum_parts(const T* from, int parts, int stride, bool inside) {
    T part[MAX_PARTS];
#pragma unroll
    for (int k = 0; k < MAX_PARTS; ++k) part[k] = inside && k < parts ? fresh(from + (size_t)k * stride) : T(0.f);
    float sum = 0.f;
#pragma unroll
    for (int k = 0; k < MAX_PARTS; ++k) sum += as_float(part[k]);
    return sum;
}
__device__ __forceinline__ float share_of(float logit) { return __fdividef(1.f, 1.f + __expf(-logit)); }
// One over the root of the mean square.
__device__ __forceinline__ float inverse_size(float squares, float count, float eps) { return rsqrtf(__fdividef(squares, count) + eps); }

// Four numbers divided by their sum, which is no denormal. Twenty times two of these in a row are what a launch waits for.
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
        for (int c = 0; c < STREAMS; ++c) m[r][c] = __expf(m[r][c] - top);
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

// What the last output is weighted with, for one row: gate and comb, from its site's logits.
__device__ __forceinline__ void last_weights(const Mix& p, int row, int lane, float* gate, float* comb) {
    const float logit = lane < MIXES - STREAMS ? __ldcg(p.logits + row * MIXES + STREAMS + lane) : 0.f;
    float m[STREAMS][STREAMS];
#pragma unroll
    for (int i = 0; i < STREAMS * STREAMS; ++i) m[i / STREAMS][i % STREAMS] = __shfl_sync(~0u, logit, STREAMS + i);
    sinkhorn(m, p.iters, p.hc_eps);
    if (lane < STREAMS) gate[lane] = 2.f * share_of(logit);
#pragma unroll
    for (int i = 0; i < STREAMS * STREAMS; ++i)
        if (lane == i) comb[i] = m[i / STREAMS][i % STREAMS];
}

// The block beside the others: logits for the next site, while they make the input. `scale`, `base`: of mix STREAMS + lane.
__device__ __forceinline__ void next_logits(const Mix& p, uint32_t launch, int group, int warp, int lane, float scale, float base) {
    constexpr int FIRST = UNEQUAL, COUNT = NORM - FIRST, PER_WARP = (COUNT + WARPS - 1) / WARPS;
    __shared__ float sums[COUNT];
    for (int row = group; row < p.rows; row += p.groups) {
        float mine[PER_WARP];
        gather(p.board + ((size_t)row * WORDS + FIRST + warp) * p.chunks, WARPS, (COUNT - warp + WARPS - 1) / WARPS, p.chunks, launch, lane, mine);
#pragma unroll
        for (int v = 0; v < PER_WARP; ++v)
            if (lane == 0 && warp + v * WARPS < COUNT) sums[warp + v * WARPS] = mine[v];
        __syncthreads();
        if (warp == 0 && lane < MIXES - STREAMS) {
            const float inv = inverse_size((sums[0] + sums[1]) + (sums[2] + sums[3]), (float)STREAMS * p.d, p.norm_eps);
            p.logits[row * MIXES + STREAMS + lane] = sums[FIRST_MIX - FIRST + STREAMS + lane] * inv * scale + base;
        }
        __syncthreads();
    }
}

// A step of a sum over the warp that halves the values a lane holds and doubles the lanes that each is summed over.
template <int HALF> __device__ __forceinline__ void fold(float (&v)[VALUES], int lane, int across) {
    const bool upper = lane & across;
#pragma unroll
    for (int k = 0; k < HALF; ++k) {
        const float low = v[k], high = v[k + HALF];
        v[k] = (upper ? high : low) + __shfl_xor_sync(~0u, upper ? low : high, across);
    }
}

// MANY: the most rows of a block.
template <typename Act, int MANY>
__global__ void __launch_bounds__(THREADS, RESIDENT) mix_kernel(const __grid_constant__ Mix p) {
    __shared__ float parts[2][WARPS][VALUES], squares[MANY][SHARE_WARPS], known[MANY][KNOWN];
    __shared__ float4 gates[MANY], combs[MANY][STREAMS];
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
    const bool is_next = beside && STREAMS + lane < p.mixes;
    const float next_scale = is_next ? __ldg(p.scale + STREAMS + lane) : 0.f, next_base = is_next ? __ldg(p.base + STREAMS + lane) : 0.f;
    let_next_start();
    if (p.y && !beside)
        for (int i = warp; i < MANY; i += WARPS)
            if (group + i * p.groups < p.rows)
                last_weights(p, group + i * p.groups, lane, reinterpret_cast<float*>(&gates[i]), reinterpret_cast<float*>(combs[i]));
    wait_for_earlier();
    uint32_t* const runs = p.launches + blockIdx.x;
    uint32_t launch;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(launch) : "l"(runs) : "memory");

    if (beside) {
        if (p.mixes == MIXES) next_logits(p, launch, group, warp, lane, next_scale, next_base);
        if (tid == 0) *runs = max(launch + 1, 1u);   // 0 is no launch's number
        return;
    }
    Act* const streams = static_cast<Act*>(p.streams);
    float now[MANY][STREAMS];
#pragma unroll
    for (int i = 0; i < MANY; ++i) {
        const int row = group + i * p.groups;
        if (row >= p.rows) break;
        Act* const at = streams + (size_t)row * STREAMS * p.d + c;
        float v[VALUES] = {};
        Act old[STREAMS];
#pragma unroll
        for (int n = 0; n < STREAMS; ++n) old[n] = inside ? fresh(at + n * p.d) : Act(0.f);
        if (!p.y) {
#pragma unroll
            for (int n = 0; n < STREAMS; ++n) now[i][n] = as_float(old[n]);
        } else {   // all is asked for before the first is used
            const size_t from = (size_t)row * p.parts * p.d + c;
            const float y = as_float(as_act<Act>(p.y_is_f32 ? sum_parts(static_cast<const float*>(p.y) + from, p.parts, p.d, inside)
                                                            : sum_parts(static_cast<const Act*>(p.y) + from, p.parts, p.d, inside)));
            if (i == 0) __syncthreads();   // the weights are there
            const float4 gate = gates[i];
            float4 mixed = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
            for (int j = 0; j < STREAMS; ++j) {
                const float4 k = combs[i][j];
                const float s = as_float(old[j]);
                mixed.x += k.x * s; mixed.y += k.y * s; mixed.z += k.z * s; mixed.w += k.w * s;
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
        }
        // Pair k belongs to share k % SHARES.
#pragma unroll
        for (int n = 0; n < STREAMS; ++n)
#pragma unroll
            for (int m = n + 1; m < STREAMS; ++m)
                if (pair_of(n, m) % SHARES == share) v[EACH + pair_of(n, m) / SHARES] = now[i][n] * now[i][m];
#pragma unroll
        for (int n = 0; n < STREAMS; ++n)
            if ((UNEQUAL + n) % SHARES == share) v[EACH + (UNEQUAL + n) / SHARES] = now[i][n] * now[i][n];
        fold<8>(v, lane, 16); fold<4>(v, lane, 8); fold<2>(v, lane, 4); fold<1>(v, lane, 2);
        v[0] += __shfl_xor_sync(~0u, v[0], 1);
        if (lane % (32 / VALUES) == 0) parts[i & 1][warp][lane / (32 / VALUES)] = v[0];
        __syncthreads();   // and every thread has read the streams
#pragma unroll
        for (int n = 0; n < STREAMS; ++n)
            if (p.y && inside && n / (STREAMS / SHARES) == share) at[n * p.d] = as_act<Act>(now[i][n]);
        if (tid < NORM) {
            const int pair = tid, mix = tid - FIRST_MIX;
            const int of = tid < PAIRS ? pair % SHARES : mix / EACH, value = tid < PAIRS ? EACH + pair / SHARES : mix % EACH;
            float total = 0.f;
#pragma unroll
            for (int w = 0; w < SHARE_WARPS; ++w) total += parts[i & 1][of * SHARE_WARPS + w][value];
            tell(p.board + ((size_t)row * WORDS + tid) * p.chunks + chunk, total, launch);
        }
    }
    // A warp gathers two of the numbers that x takes, WARPS apart.
    for (int i = 0; i < MANY; ++i) {
        const int row = group + i * p.groups;
        if (row >= p.rows) break;
        float mine[2];
        gather(p.board + ((size_t)row * WORDS + warp) * p.chunks, WARPS, warp + WARPS < KNOWN ? 2 : 1, p.chunks, launch, lane, mine);
        if (lane == 0) known[i][warp] = mine[0];
        if (lane == 0 && warp + WARPS < KNOWN) known[i][warp + WARPS] = mine[1];
    }
    __syncthreads();
    float x[MANY], size[MANY];   // size: sum of squares of x; -1: to be measured
    bool measures = false;
#pragma unroll
    for (int i = 0; i < MANY; ++i) {
        if (group + i * p.groups >= p.rows) break;
        const float* square = known[i] + UNEQUAL;
        const float inv = inverse_size((square[0] + square[1]) + (square[2] + square[3]), (float)STREAMS * p.d, p.norm_eps);
        float into[STREAMS], apart = 0.f;   // apart: if no two streams had anything to do with each other
        x[i] = 0.f;
#pragma unroll
        for (int n = 0; n < STREAMS; ++n) {
            into[n] = share_of(known[i][FIRST_MIX + n] * inv * into_scale[n] + into_base[n]) + p.hc_eps;
            x[i] += into[n] * now[i][n];
            apart += into[n] * into[n] * square[n];
        }
        x[i] = as_float(as_act<Act>(x[i]));
        float all = apart;
#pragma unroll
        for (int n = 0; n < STREAMS; ++n)
#pragma unroll
            for (int m = n + 1; m < STREAMS; ++m) all += 2.f * into[n] * into[m] * known[i][pair_of(n, m)];
        size[i] = all * CANCELS < apart ? -1.f : all;
        measures |= size[i] == -1.f;
    }
    if (measures) {   // the same in all blocks of the group
#pragma unroll
        for (int i = 0; i < MANY; ++i) {
            if (group + i * p.groups >= p.rows) break;
            float square = x[i] * x[i];
            for (int k = 16; k; k >>= 1) square += __shfl_xor_sync(~0u, square, k);
            if (share == 0 && lane == 0) squares[i][warp] = square;
        }
        __syncthreads();
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
            const float sum = gather(p.board + ((size_t)row * WORDS + NORM) * p.chunks, p.chunks, launch, lane);
            if (size[i] == -1.f) size[i] = sum;
        }
    }
#pragma unroll
    for (int i = 0; i < MANY; ++i) {
        const int row = group + i * p.groups;
        if (row >= p.rows || share) break;
        const float normed = weight * (x[i] * inverse_size(size[i], (float)p.d, p.norm_eps));
        if (inside) static_cast<Act*>(p.x)[(size_t)row * p.d + c] = as_act<Act>(normed);
    }
    if (tid == 0) *runs = max(launch + 1, 1u);   // 0 is no launch's number
}

template <typename Act> static int go(const Mix& p, cudaStream_t stream) {
    const int blocks = (p.chunks + 1) * p.groups, many = (p.rows + p.groups - 1) / p.groups;
    const auto with = [&](auto kernel) {   // refused rather than waited for for ever
        int device = 0, count = 0, each = 0;
        cudaError_t error = cudaGetDevice(&device);
        if (error == cudaSuccess) error = cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
        if (error == cudaSuccess) error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&each, kernel, THREADS, 0);
        if (error != cudaSuccess) return (int)error;
        if (each * count < blocks) return (int)cudaErrorCooperativeLaunchTooLarge;
        return launch(kernel, blocks, THREADS, 0, 1, stream, p);
    };
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
