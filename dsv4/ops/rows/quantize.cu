// Decode step and prompts: rows of BF16 activations in FP8 or NVFP4, plain or of what makes the row here: a
// norm, or an expert's clamped SwiGLU. A row lies in registers from the first read to the last write; bit for
// bit codec.py's (round.cuh).
#ifdef __CUDACC__
#include "launch.cuh"
#endif
#include "round.cuh"

enum { PLAIN = 0, NORM = 1, SWIGLU = 2 };
constexpr int MAX_THREADS = 512, WARPS = MAX_THREADS / 32, CHANNELS = 32;   // of a thread

struct Rows {
    const uint16_t* x;
    const float* weight;    // of the norm, [width]; of the experts, [rows], or null: one
    uint16_t *made, *out;   // the row before it is rounded [rows][width], null: not wanted; and after that
    uint8_t *codes, *scales;
    float* factors;   // the rows' global scales
    int64_t x_row, out_row;
    int count, padded;   // rows; with those that pad the last tile of scales
    int width, how, is_tiled;
    int warps, per_block;   // of a row; rows of a block: several if a row has one warp or two
    float eps, share;       // of the norm; `eps` of SwiGLU: the limit; one over the width
};

// A thread's place: its row in the block, that row's first warp, its own number in the row.
struct Place {
    int row, first_warp, thread;
    __device__ __forceinline__ Place(int warps, int per_block)
        : row(per_block == 1 ? 0 : (int)(threadIdx.x >> 5) >> (warps - 1)),
          first_warp(row * warps),
          thread(threadIdx.x - first_warp * 32) {}
};

__device__ __forceinline__ float warp_sum(float v) {
#pragma unroll
    for (int i = 1; i < 32; i <<= 1) v += __shfl_xor_sync(~0u, v, i);
    return v;
}
// Over the warps of a row.
__device__ __forceinline__ float row_sum(float v, float* parts, const Place& place, int warps) {
    v = warp_sum(v);
    if (warps == 1) return v;
    const int lane = threadIdx.x & 31;
    if (lane == 0) parts[threadIdx.x >> 5] = v;
    __syncthreads();
    return warp_sum(lane < warps ? parts[place.first_warp + lane] : 0.f);
}
__device__ __forceinline__ uint32_t row_largest(uint32_t top, uint32_t* parts, const Place& place,
                                                int warps) {
    top = __reduce_max_sync(~0u, top);
    if (warps == 1) return top;
    const int lane = threadIdx.x & 31;
    if (lane == 0) parts[threadIdx.x >> 5] = top;
    __syncthreads();
    return __reduce_max_sync(~0u, lane < warps ? parts[place.first_warp + lane] : 0u);
}

__device__ __forceinline__ float low(uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high(uint32_t pair) { return __uint_as_float(pair & 0xFFFF0000u); }

// N words from `channel` on, eight channels at a time; zero beyond the row.
template <int N>
__device__ __forceinline__ void read(const uint16_t* row, int channel, int width, uint32_t (&x)[N]) {
#pragma unroll
    for (int i = 0; i < N; i += 4) {
        const bool is_inside = channel + 2 * i < width;
        const uint4 v = is_inside ? *reinterpret_cast<const uint4*>(row + channel + 2 * i)
                                  : make_uint4(0, 0, 0, 0);
        x[i] = v.x;
        x[i + 1] = v.y;
        x[i + 2] = v.z;
        x[i + 3] = v.w;
    }
}
template <int N>
__device__ __forceinline__ void write(uint16_t* row, int channel, int width, const uint32_t (&x)[N]) {
#pragma unroll
    for (int i = 0; i < N; i += 4)
        if (channel + 2 * i < width)
            *reinterpret_cast<uint4*>(row + channel + 2 * i) = make_uint4(x[i], x[i + 1], x[i + 2], x[i + 3]);
}

// gate and up are BF16; comparisons keep NaN.
__device__ __forceinline__ float swiglu(float gate, float up, float weight, float limit) {
    gate = gate > limit ? limit : gate;
    up = up > limit ? limit : up < -limit ? -limit : up;
    return weight * (__fdiv_rn(gate, 1.f + __expf(-gate)) * up);
}

// N words at a time, the threads of a row side by side. With 8, a block of NVFP4, that is what comes out;
// else FP8 or BF16.
template <int N, bool CODES, int SOURCE>
__global__ void __launch_bounds__(MAX_THREADS) rows_kernel(const __grid_constant__ Rows p) {
    static_assert(N == 8 || (N == 4 && !CODES));
    constexpr int ITEMS = CHANNELS / (2 * N);
    __shared__ float sums[WARPS];
    __shared__ uint32_t tops[WARPS];
    launch_dependents();
    wait_for_prerequisites();
    const Place place(p.warps, p.per_block);
    const int row = blockIdx.x * p.per_block + place.row;
    const bool is_row = row < p.count;
    const auto channel = [&](int i) { return (place.thread + i * p.warps * 32) * 2 * N; };
    uint32_t x[ITEMS][N];
    // Those of a row beyond the last take the last one, so that all threads of a block meet; nothing of
    // theirs is stored.
    const int given = is_row ? row : p.count - 1;
    const uint16_t* from = p.x + given * p.x_row;
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) read(from, channel(i), p.width, x[i]);
    if constexpr (SOURCE == NORM) {
        float sum = 0.f;
#pragma unroll
        for (int i = 0; i < ITEMS; ++i)
#pragma unroll
            for (int k = 0; k < N; ++k)
                sum = fmaf(low(x[i][k]), low(x[i][k]), fmaf(high(x[i][k]), high(x[i][k]), sum));
        const float inverse = __frcp_rn(__fsqrt_rn(row_sum(sum, sums, place, p.warps) * p.share + p.eps));
#pragma unroll
        for (int i = 0; i < ITEMS; ++i)
#pragma unroll
            for (int k = 0; k < N; k += 2) {
                if (channel(i) + 2 * k >= p.width) continue;
                const float4 w = __ldg(reinterpret_cast<const float4*>(p.weight + channel(i) + 2 * k));
                x[i][k] = pack_bf16(w.x * (low(x[i][k]) * inverse), w.y * (high(x[i][k]) * inverse));
                x[i][k + 1] = pack_bf16(w.z * (low(x[i][k + 1]) * inverse),
                                        w.w * (high(x[i][k + 1]) * inverse));
            }
    } else if constexpr (SOURCE == SWIGLU) {
        const float weight = p.weight ? __ldg(p.weight + given) : 1.f;
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) {
            uint32_t up[N];
            read(from + p.width, channel(i), p.width, up);
#pragma unroll
            for (int k = 0; k < N; ++k)
                x[i][k] = pack_bf16(swiglu(low(x[i][k]), low(up[k]), weight, p.eps),
                                    swiglu(high(x[i][k]), high(up[k]), weight, p.eps));
        }
    }
    if (p.made && is_row)
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) write(p.made + (int64_t)row * p.width, channel(i), p.width, x[i]);
    if constexpr (N == 4) {
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) {
            if (p.how == A8) round_a8(x[i]);
            if (is_row) write(p.out + row * p.out_row, channel(i), p.width, x[i]);
        }
        return;
    }
    uint32_t top[ITEMS], all = 0;
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) all = max(all, top[i] = largest(x[i]));
    const float scale = row_scale(row_largest(all, tops, place, p.warps));
    if constexpr (CODES) {
        if (is_row && place.thread == 0) p.factors[row] = scale;
        if (row >= p.padded) return;
        const int blocks = (p.width + 15) / 16, padded = (blocks + 3) / 4 * 4;
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) {
            const int block = channel(i) / 16;
            const uint32_t code = is_row ? block_code(top[i], scale) : 0u;
            if (p.is_tiled) {
                const int64_t tile = (int64_t)(row / 128) * (padded / 4) + block / 4;
                if (block < padded)
                    p.scales[tile * 512 + row % 32 * 16 + row % 128 / 32 * 4 + block % 4] = block < blocks
                                                                                                ? code
                                                                                                : 0;
            } else if (block < blocks) p.scales[(int64_t)row * blocks + block] = code;
            if (!is_row || block >= blocks) continue;
            const Ladder by = ladder(unit_of(code, scale), scale);
            uint32_t* to = reinterpret_cast<uint32_t*>(p.codes + (int64_t)row * (p.width / 2) + block * 8);
            const uint32_t first = eight_codes(x[i], by), second = eight_codes(x[i] + 4, by);
            if (p.width % 16 == 0) *reinterpret_cast<uint2*>(to) = make_uint2(first, second);
            else {
                to[0] = first;
                if (block * 16 + 8 < p.width) to[1] = second;
            }
        }
    } else if constexpr (N == 8) {
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) {
            round_a4(x[i], top[i], scale);
            if (is_row) write(p.out + row * p.out_row, channel(i), p.width, x[i]);
        }
    }
}

// What quantize.py launches.
template __global__ void rows_kernel<4, false, PLAIN>(const __grid_constant__ Rows);
template __global__ void rows_kernel<4, false, NORM>(const __grid_constant__ Rows);
template __global__ void rows_kernel<4, false, SWIGLU>(const __grid_constant__ Rows);
template __global__ void rows_kernel<8, false, PLAIN>(const __grid_constant__ Rows);
template __global__ void rows_kernel<8, false, NORM>(const __grid_constant__ Rows);
template __global__ void rows_kernel<8, false, SWIGLU>(const __grid_constant__ Rows);
template __global__ void rows_kernel<8, true, PLAIN>(const __grid_constant__ Rows);
template __global__ void rows_kernel<8, true, NORM>(const __grid_constant__ Rows);
template __global__ void rows_kernel<8, true, SWIGLU>(const __grid_constant__ Rows);
