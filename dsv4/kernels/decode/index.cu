// Decode step: the index of a CSA layer, in V4's sizes and BF16: its queries, rotated, transformed and rounded, and the scores of its keys. To the
// bit what prepare.py and index.py do in Triton for any size, in a fifth of the instructions.
//
// A launch finds its instructions in no cache, and most of these run once. So with `warms` a kernel runs once before its wait, on zeros.
#include "cluster.cuh"
#include "fragments.cuh"
#include "round.cuh"

constexpr int HEADS = 64, WIDTH = 128, ROPE = 64, WARPS = 4;
constexpr int KEYS = 16, TILES = KEYS / 8;          // of a block
constexpr int KEY_BYTES = WIDTH / 2, BLOCKS = WIDTH / 32;
constexpr int OWN = HEADS / WARPS, DOTS_ROW = KEYS + 4;   // heads of a warp; few lanes meet in a bank
constexpr float SHARE = 0.08838834764831845f;       // 128^-0.5
// Keys enter the product 2^63 too small, as in index.py, and there is why.
constexpr int LIFT = 63;

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
        const int64_t angle = max((int)__ldcg(p.positions + head / HEADS), 0) * (int64_t)(ROPE / 2) + 2 * lane - (WIDTH - ROPE) / 2;
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
        const float2 a = open_bf16(v.x), b = open_bf16(v.y);
        const float2 low = open_bf16(bf16_pair(__fmaf_rn(a.x, c.x, -__fmul_rn(a.y, s.x)), __fmaf_rn(a.x, s.x, __fmul_rn(a.y, c.x))));
        const float2 high = open_bf16(bf16_pair(__fmaf_rn(b.x, c.y, -__fmul_rn(b.y, s.y)), __fmaf_rn(b.x, s.y, __fmul_rn(b.y, c.y))));
        const float sums[4] = {low.x + low.y, low.x - low.y, high.x + high.y, high.x - high.y};
        float x[4] = {sums[0] + sums[2], sums[1] + sums[3], sums[0] - sums[2], sums[1] - sums[3]};
#pragma unroll
        for (int bit = 1; bit < 32; bit <<= 1) {
            const float sign = lane & bit ? -1.f : 1.f;
#pragma unroll
            for (int i = 0; i < 4; ++i) x[i] = __fmaf_rn(sign, x[i], __shfl_xor_sync(~0u, x[i], bit));
        }
        const uint32_t words[2] = {bf16_pair(x[0] * SHARE, x[1] * SHARE), bf16_pair(x[2] * SHARE, x[3] * SHARE)};
        const uint32_t top = over<8>(largest(words)), code = (__float_as_uint(fmaxf(finite_top(top), 6.f * 0x1p-126f) * (1.f / 6.f)) + 0x7FFFFFu) >> 23;
        const float unit = __uint_as_float(top > INF ? 0x7FC00000u : code << 23), inverse = __uint_as_float((254u - code) << 23);
        uint32_t rounded[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float2 two = open_bf16(words[i]);
            rounded[i] = bf16_pair(e2m1_round(finite(two.x) * inverse) * unit, e2m1_round(finite(two.y) * inverse) * unit);
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

struct Memory {
    float dots[WARPS][OWN][DOTS_ROW], weights[WARPS][OWN], sums[WARPS][KEYS];
};

// The codes in the upper four bits of both halves, as BF16 times `unit`. A code's low bits are those of a number 2^126 below it.
__device__ __forceinline__ uint32_t open_codes(uint32_t halves, uint32_t unit) {
    return times_bf16((halves >> 6 & 0x01C001C0u) | (halves & 0x80008000u), unit);
}

// Sixteen keys a block. A product's 16 channels are the even ones of a block of 32, then the odd ones: those of its bytes' lower and upper halves; a
// lane has bytes 4t .. 4t + 3. A warp has the heads 8n + 2 warp and 8n + 2 warp + 1, as rows n and n + 8; it adds up a key's, by rising
// head but for the first two, then the warps' are added.
__global__ void __launch_bounds__(WARPS * 32) scores_kernel(const Scores p) {
    Memory& s = *(Memory*)shared_memory();
    launch_dependents();
    const int row = blockIdx.x / p.programs, tid = threadIdx.x, warp = tid >> 5, lane = tid & 31, g = lane >> 2, t = lane & 3;
    const int first = (blockIdx.x - row * p.programs) * KEYS, count = ((int)__ldcg(p.positions + row) + 1) >> p.ratio_bits;
    if (first >= count) {
        wait_for_prerequisites();
        return;
    }
    const int* pages = p.page_table + __ldcg(p.slots + row) * p.pages;
    uint32_t words[TILES][BLOCKS], scales[TILES];   // of key g of each tile
#pragma unroll
    for (int i = 0; i < TILES; ++i) {
        const int entry = min(first + 8 * i + g, count - 1);   // a score beyond the last is not kept
        const int64_t at = ((int64_t)__ldcg(pages + (entry >> p.page_bits)) << p.page_bits) + (entry & ((1 << p.page_bits) - 1));
        const uint32_t* from = reinterpret_cast<const uint32_t*>(p.keys + at * KEY_BYTES) + t;
#pragma unroll
        for (int j = 0; j < BLOCKS; ++j) words[i][j] = __ldcg(from + 4 * j);
        scales[i] = __ldcg(reinterpret_cast<const uint32_t*>(p.scales) + at);
    }
    uint32_t keys[TILES][2 * BLOCKS][2], q[2 * BLOCKS][4] = {};
#pragma unroll
    for (int i = 0; i < TILES; ++i)
#pragma unroll
        for (int j = 0; j < BLOCKS; ++j) {
            // A scale that is NaN, or beyond what LIFT leaves room for, gives NaN.
            const uint32_t code = (scales[i] >> 8 * j & 255) + 126 - LIFT, unit = (code >= 255 ? 0x7FC0u : code << 7) * 0x10001u;
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const uint32_t bytes = __byte_perm(words[i][j], 0, h ? 0x3424 : 0x1404);
                keys[i][j][h] = open_codes(bytes << 4, unit);
                keys[i][BLOCKS + j][h] = open_codes(bytes, unit);
            }
        }
    bool is_real = !p.warms;
#pragma unroll 1
    for (;; is_real = true) {
        if (is_real) {
            wait_for_prerequisites();
            const uint4* from = reinterpret_cast<const uint4*>(p.q + ((int64_t)row * HEADS + 8 * g + 2 * warp) * WIDTH) + t;
#pragma unroll
            for (int e = 0; e < 2; ++e)
#pragma unroll
                for (int j = 0; j < BLOCKS; ++j) {
                    const uint4 v = __ldcg(from + e * (WIDTH / 8) + 4 * j);
                    q[j][e] = __byte_perm(v.x, v.y, 0x5410);
                    q[j][2 + e] = __byte_perm(v.z, v.w, 0x5410);
                    q[BLOCKS + j][e] = __byte_perm(v.x, v.y, 0x7632);
                    q[BLOCKS + j][2 + e] = __byte_perm(v.z, v.w, 0x7632);
                }
            if (lane < OWN) {
                const uint16_t weight = __ldcg(reinterpret_cast<const uint16_t*>(p.weights) + row * HEADS + 8 * (lane >> 1) + 2 * warp + (lane & 1));
                s.weights[warp][lane] = __fmul_rn(__uint_as_float((uint32_t)weight << 16), p.factor);
            }
        }
        float d[TILES][4] = {};
#pragma unroll
        for (int k = 0; k < 2 * BLOCKS; ++k)
#pragma unroll
            for (int i = 0; i < TILES; ++i) multiply_bf16(d[i], q[k], keys[i][k][0], keys[i][k][1]);
#pragma unroll
        for (int i = 0; i < TILES; ++i)
#pragma unroll
            for (int e = 0; e < 2; ++e) *reinterpret_cast<float2*>(&s.dots[warp][2 * g + e][8 * i + 2 * t]) = make_float2(d[i][2 * e], d[i][2 * e + 1]);
        __syncwarp();
        if (lane < KEYS) {
            const float* weights = s.weights[warp];
            float sum = __fmaf_rn(weights[0], at_least_0(s.dots[warp][0][lane]), __fmul_rn(weights[1], at_least_0(s.dots[warp][1][lane])));
#pragma unroll
            for (int i = 2; i < OWN; ++i) sum = __fmaf_rn(weights[i], at_least_0(s.dots[warp][i][lane]), sum);
            s.sums[warp][lane] = sum;
        }
        __syncthreads();
        if (!is_real) continue;
        if (tid < KEYS && first + tid < count) {
            const float sum = __fadd_rn(__fadd_rn(s.sums[0][tid], s.sums[2][tid]), __fadd_rn(s.sums[1][tid], s.sums[3][tid]));
            p.out[row * p.stride + first + tid] = __fmul_rn(sum, 0x1p63f);
        }
        return;
    }
}

static_assert(sizeof(Memory) == 5632);   // index.py
