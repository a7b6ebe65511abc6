// Decode step: the index of a CSA layer, in V4's sizes and BF16: its queries, rotated, transformed and
// rounded, and the scores of its keys. On Hopper to the bit what attention/prepare.py and decode.py do in
// Triton for any size, in a fifth of the instructions.
//
// A launch finds its instructions in no cache, and most of these run once. So with `warms` a kernel runs once
// before its wait, on zeros.
#include "cluster.cuh"
#include "fragments.cuh"
#include "pages.cuh"
#include "rope.cuh"
#include "round.cuh"

constexpr int HEADS = 64, WIDTH = 128, ROPE = 64, WARPS = 4;
constexpr int KEYS = 16, TILES = KEYS / 8;   // scored at a time
constexpr int KEY_BYTES = WIDTH / 2, BLOCKS = WIDTH / 32;
constexpr int OWN = HEADS / WARPS, DOTS_ROW = KEYS + 4;   // heads of a warp; few lanes meet in a bank
constexpr float SHARE = 0.08838834764831845f;             // 128^-0.5
// Keys enter the product 2^63 too small, as in decode.py, and there is why.
constexpr int LIFT = 63;
constexpr int TOGETHER = 4;   // sums of eight heads each, where a warp has all

struct Queries {
    __nv_bfloat16* q;           // [rows][HEADS][WIDTH]
    const float *cos, *sin;     // [positions][ROPE / 2]
    const int64_t* positions;   // [rows]
    int warms;
};

// A warp has a head, a lane four channels. Sums of the transform by channel bit, the lowest first.
__global__ void __launch_bounds__(WARPS * 32) queries_kernel(const Queries p) {
    launch_dependents();
    const int head = blockIdx.x * WARPS + (threadIdx.x >> 5), lane = threadIdx.x & 31;   // of all rows
    float2 c = make_float2(1.f, 1.f), s = make_float2(0.f, 0.f);
    if (lane >= (WIDTH - ROPE) / 4) {
        const int64_t angle = max((int)__ldcg(p.positions + head / HEADS), 0) * (int64_t)(ROPE / 2) +
                              2 * lane - (WIDTH - ROPE) / 2;
        c = __ldg(reinterpret_cast<const float2*>(p.cos + angle));
        s = __ldg(reinterpret_cast<const float2*>(p.sin + angle));
    }
    uint2* at = reinterpret_cast<uint2*>(p.q + (int64_t)head * WIDTH) + lane;
    uint2 v = make_uint2(0, 0);
    bool is_real = !p.warms;
#pragma unroll 1
    for (;; is_real = true) {
        if (is_real) {
            wait_for_prerequisites();
            v = __ldcg(at);
        }
        const float2 low = open_bf16(rotated(v.x, c.x, s.x)), high = open_bf16(rotated(v.y, c.y, s.y));
        const float sums[4] = {low.x + low.y, low.x - low.y, high.x + high.y, high.x - high.y};
        float x[4] = {sums[0] + sums[2], sums[1] + sums[3], sums[0] - sums[2], sums[1] - sums[3]};
#pragma unroll
        for (int bit = 1; bit < 32; bit <<= 1) {
            const float sign = lane & bit ? -1.f : 1.f;
#pragma unroll
            for (int i = 0; i < 4; ++i) x[i] = __fmaf_rn(sign, x[i], __shfl_xor_sync(~0u, x[i], bit));
        }
        const uint32_t words[2] = {pack_bf16(x[0] * SHARE, x[1] * SHARE),
                                   pack_bf16(x[2] * SHARE, x[3] * SHARE)};
        const Scale4 by(over<8>(largest(words)));
        uint32_t rounded[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float2 two = open_bf16(words[i]);
            rounded[i] = pack_bf16(e2m1_round(finite(two.x) * by.inverse) * by.unit,
                                   e2m1_round(finite(two.y) * by.inverse) * by.unit);
        }
        if (is_real) {
            *at = make_uint2(rounded[0], rounded[1]);
            return;
        }
    }
}

struct Scores {
    const __nv_bfloat16 *q, *weights;   // [rows][HEADS][WIDTH], FP4 values; [rows][HEADS]
    const uint8_t *keys, *scales;       // MXFP4
    const int* page_table;              // [slots][pages]
    const int64_t *slots, *positions;   // [rows]
    float* out;                         // [rows][stride]
    int64_t stride;
    int pages, page_bits, ratio_bits;   // powers of two: entries of a page, tokens of an entry
    int programs;                       // blocks of a row
    int warms;
    float factor;
};

// The codes in the upper four bits of both halves, as BF16 times `unit`. A code's low bits are those of a
// number 2^126 below it.
__device__ __forceinline__ uint32_t open_codes(uint32_t halves, uint32_t unit) {
    return times_bf16((halves >> 6 & 0x01C001C0u) | (halves & 0x80008000u), unit);
}

// Sixteen keys of a row, from `first` on, or its last one: a score beyond that is not kept. A product's 16
// channels are the even ones of a block of 32, then the odd ones: those of its bytes' lower and upper halves;
// a lane has bytes 4t .. 4t + 3 of key g of each tile.
struct Keys {
    int pages[TILES];
    uint32_t words[TILES][BLOCKS], scales[TILES];

    __device__ __forceinline__ static int entry(int first, int tile, int count) {
        return min(first + 8 * tile + (int)(threadIdx.x >> 2 & 7), count - 1);
    }
    __device__ __forceinline__ void find(const Scores& p, const int* table, int first, int count) {
#pragma unroll
        for (int i = 0; i < TILES; ++i) pages[i] = __ldcg(table + (entry(first, i, count) >> p.page_bits));
    }
    __device__ __forceinline__ void load(const Scores& p, int first, int count) {
#pragma unroll
        for (int i = 0; i < TILES; ++i) {
            const int64_t at = row_of_entry((int64_t)pages[i], entry(first, i, count), p.page_bits);
            const uint32_t* from = reinterpret_cast<const uint32_t*>(p.keys + at * KEY_BYTES) +
                                   (threadIdx.x & 3);
#pragma unroll
            for (int j = 0; j < BLOCKS; ++j) words[i][j] = __ldcg(from + 4 * j);
            scales[i] = __ldcg(reinterpret_cast<const uint32_t*>(p.scales) + at);
        }
    }
    // By product: words 0 and 2 of tile 0's, 1 and 3 of tile 1's.
    __device__ __forceinline__ void open(uint32_t (&keys)[2 * BLOCKS][4]) const {
#pragma unroll
        for (int i = 0; i < TILES; ++i)
#pragma unroll
            for (int j = 0; j < BLOCKS; ++j) {
                // A scale that is NaN, or beyond what LIFT leaves room for, gives NaN.
                const uint32_t code = (scales[i] >> 8 * j & 255) + 126 - LIFT,
                               unit = (code >= 255 ? 0x7FC0u : code << 7) * 0x10001u;
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    const uint32_t bytes = __byte_perm(words[i][j], 0, h ? 0x3424 : 0x1404);
                    keys[j][2 * h + i] = open_codes(bytes << 4, unit);
                    keys[BLOCKS + j][2 * h + i] = open_codes(bytes, unit);
                }
            }
    }
};
// Eight channels of a head: two of each product's words, of the even ones, then of the odd ones.
__device__ __forceinline__ uint4 halved(const uint4* from) {
    const uint4 v = __ldcg(from);
    return make_uint4(__byte_perm(v.x, v.y, 0x5410), __byte_perm(v.z, v.w, 0x5410),
                      __byte_perm(v.x, v.y, 0x7632), __byte_perm(v.z, v.w, 0x7632));
}
__device__ __forceinline__ float weight(const Scores& p, int row, int head) {
    const uint16_t bits = __ldcg(reinterpret_cast<const uint16_t*>(p.weights) + row * HEADS + head);
    return __fmul_rn(__uint_as_float((uint32_t)bits << 16), p.factor);
}

// Sixteen keys are all of a block. A warp has the heads 8n + 2 warp and 8n + 2 warp + 1, as rows n and n + 8;
// it adds up a key's, by rising head but for the first two, then the warps' are added.
struct Few {
    float dots[WARPS][OWN][DOTS_ROW], weights[WARPS][OWN], sums[WARPS][KEYS];
};
__device__ __forceinline__ void score_few(const Scores& p, Few& s, int row, int first, int count,
                                          const int* table) {
    const int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31, g = lane >> 2, t = lane & 3;
    Keys from;
    from.find(p, table, first, count);
    from.load(p, first, count);
    uint32_t keys[2 * BLOCKS][4], q[2 * BLOCKS][4] = {};
    from.open(keys);
    bool is_real = !p.warms;
#pragma unroll 1
    for (;; is_real = true) {
        if (is_real) {
            wait_for_prerequisites();
            const uint4* at =
                reinterpret_cast<const uint4*>(p.q + ((int64_t)row * HEADS + 8 * g + 2 * warp) * WIDTH) + t;
#pragma unroll
            for (int e = 0; e < 2; ++e)
#pragma unroll
                for (int j = 0; j < BLOCKS; ++j) {
                    const uint4 v = halved(at + e * (WIDTH / 8) + 4 * j);
                    q[j][e] = v.x;
                    q[j][2 + e] = v.y;
                    q[BLOCKS + j][e] = v.z;
                    q[BLOCKS + j][2 + e] = v.w;
                }
            if (lane < OWN) s.weights[warp][lane] = weight(p, row, 8 * (lane >> 1) + 2 * warp + (lane & 1));
        }
        float d[TILES][4] = {};
#pragma unroll
        for (int k = 0; k < 2 * BLOCKS; ++k)
#pragma unroll
            for (int i = 0; i < TILES; ++i) multiply_bf16(d[i], q[k], keys[k][i], keys[k][2 + i]);
#pragma unroll
        for (int i = 0; i < TILES; ++i)
#pragma unroll
            for (int e = 0; e < 2; ++e)
                *reinterpret_cast<float2*>(&s.dots[warp][2 * g + e][8 * i + 2 * t]) = make_float2(
                    d[i][2 * e], d[i][2 * e + 1]);
        __syncwarp();
        if (lane < KEYS) {
            const float* weights = s.weights[warp];
            float sum = __fmaf_rn(weights[0], at_least_0(s.dots[warp][0][lane]),
                                  __fmul_rn(weights[1], at_least_0(s.dots[warp][1][lane])));
#pragma unroll
            for (int i = 2; i < OWN; ++i) sum = __fmaf_rn(weights[i], at_least_0(s.dots[warp][i][lane]), sum);
            s.sums[warp][lane] = sum;
        }
        __syncthreads();
        if (!is_real) continue;
        if (tid < KEYS && first + tid < count) {
            const float sum = __fadd_rn(__fadd_rn(s.sums[0][tid], s.sums[2][tid]),
                                        __fadd_rn(s.sums[1][tid], s.sums[3][tid]));
            p.out[row * p.stride + first + tid] = __fmul_rn(sum, 0x1p63f);
        }
        return;
    }
}

// A warp has sixteen keys at a time, as rows, and all heads, whose queries lie in shared memory as its lanes
// take them. A lane has the heads 8n + 2t and 8n + 2t + 1 of keys g and g + 8: it adds up what a warp above
// does, in that order. The next keys travel meanwhile, and the pages of those after them.
struct Many {
    uint4 q[HEADS / 8][BLOCKS][32];   // of a product and the next
    float2 weights[HEADS / 2];
};
__device__ __forceinline__ void score_many(const Scores& p, Many& s, int row, int block, int count,
                                           const int* table) {
    const int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31, g = lane >> 2, t = lane & 3,
              step = p.programs * WARPS * KEYS;
    int first = (warp * p.programs + block) * KEYS;
    Keys from;
    uint32_t keys[2 * BLOCKS][4];
    if (first < count) {
        from.find(p, table, first, count);
        from.load(p, first, count);
        from.open(keys);
        from.find(p, table, first + step, count);
    }
    wait_for_prerequisites();
#pragma unroll
    for (int i = 0; i < HEADS / 8 / WARPS; ++i)
#pragma unroll
        for (int j = 0; j < BLOCKS; j += 2) {
            const int n = i * WARPS + warp;
            const uint4* at =
                reinterpret_cast<const uint4*>(p.q + ((int64_t)row * HEADS + 8 * n + g) * WIDTH) + t + 4 * j;
            const uint4 a = halved(at), b = halved(at + 4);
            s.q[n][j / 2][lane] = make_uint4(a.x, a.y, b.x, b.y);
            s.q[n][(BLOCKS + j) / 2][lane] = make_uint4(a.z, a.w, b.z, b.w);
        }
    if (tid < HEADS) reinterpret_cast<float*>(s.weights)[tid] = weight(p, row, tid);
    __syncthreads();
#pragma unroll 1
    for (; first < count; first += step) {
        const bool is_last = first + step >= count;
        if (!is_last) {
            from.load(p, first + step, count);
            from.find(p, table, first + 2 * step, count);
        }
        float sums[2];
#pragma unroll 1
        for (int n = 0; n < HEADS / 8; n += TOGETHER) {
            float d[TOGETHER][4] = {};
#pragma unroll
            for (int k = 0; k < 2 * BLOCKS; k += 2)
#pragma unroll
                for (int i = 0; i < TOGETHER; ++i) {
                    const uint4 q = s.q[n + i][k / 2][lane];
                    multiply_bf16(d[i], keys[k], q.x, q.y);
                    multiply_bf16(d[i], keys[k + 1], q.z, q.w);
                }
#pragma unroll
            for (int i = 0; i < TOGETHER; ++i) {
                const float2 w = s.weights[(n + i) * 4 + t];
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    const float a = at_least_0(d[i][2 * h]), b = at_least_0(d[i][2 * h + 1]);
                    sums[h] = n + i == 0 ? __fmaf_rn(w.x, a, __fmul_rn(w.y, b))
                                         : __fmaf_rn(w.y, b, __fmaf_rn(w.x, a, sums[h]));
                }
            }
        }
        if (!is_last) from.open(keys);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            sums[h] = __fadd_rn(sums[h], __shfl_xor_sync(~0u, sums[h], 2));
            sums[h] = __fadd_rn(sums[h], __shfl_xor_sync(~0u, sums[h], 1));
        }
        const int own = first + g + 8 * t;
        if (t < TILES && own < count) p.out[row * p.stride + own] = __fmul_rn(t ? sums[1] : sums[0], 0x1p63f);
    }
}

// By how many keys a row has: sixteen for each of its blocks, or more.
__global__ void __launch_bounds__(WARPS * 32, 4) scores_kernel(const Scores p) {
    launch_dependents();
    const int row = blockIdx.x / p.programs, block = blockIdx.x - row * p.programs,
              count = ((int)__ldcg(p.positions + row) + 1) >> p.ratio_bits;
    const int* table = p.page_table + __ldcg(p.slots + row) * p.pages;
    if (count > p.programs * KEYS) score_many(p, *(Many*)shared_memory(), row, block, count, table);
    else if (block * KEYS < count) score_few(p, *(Few*)shared_memory(), row, block * KEYS, count, table);
    else if (block == 0) wait_for_prerequisites();   // a launch ends no earlier than one of its blocks
}

static_assert(sizeof(Few) == 5632 && sizeof(Many) == 16640);   // decode.py
