// Decode step: what decode.cu's blocks work on: a row's keys, and a warp's 64 channels of them, as keys and
// as values.
#pragma once
#include "cluster.cuh"
#include "fragments.cuh"
#include "pages.cuh"

constexpr int CLUSTER = 8, WARPS = 8, HEADS = 8, WIDTH = 512, SLICE_WIDTH = 64, ROPE_WARP = 7, HALF = 32;
constexpr int KEYS = 80;   // of a pass, 16 at a time
constexpr int PER_LANE = (KEYS + 31) / 32;
constexpr int ROW = 448 + 2 * 64, SCALES = 8;   // bytes of a KV8 row
constexpr int SCORE_ROW = KEYS + 4, WEIGHT_ROW = KEYS + 8,
              STAGED_ROW = SLICE_WIDTH + 4;   // few lanes meet in a bank
constexpr float LOG2E = 1.4426950408889634f;

struct Attention {
    const __nv_bfloat16* q;             // [rows][heads][WIDTH], neither normed nor rotated
    const uint8_t *ring, *ring_scale;   // KV8
    const uint8_t *entries, *entries_scale;
    const int* listed;       // [rows][list_width] rows of `entries`; null: all that the row sees, by page
    const int* page_table;   // [slots][pages]
    const int64_t *slots, *positions;   // [rows]
    const int64_t* ends;                // [rows] where a row's window ends, all that is listed being visible;
                                        // null: at its position
    const float *sinks, *cos, *sin;     // [heads], [positions][HALF]
    __nv_bfloat16* out;                 // as q
    int heads, window, ring_rows, list_width, pages;
    int group_bits, ratio_bits,
        page_bits;   // powers of two: clusters of a row, tokens of an entry, entries of a page
    float scale, eps;
};

template <int GROUPS> struct Memory {
    uint8_t codes[ROPE_WARP][KEYS][SLICE_WIDTH];   // 16 bytes swizzled: `code_at`
    uint8_t rotary[KEYS][2 * SLICE_WIDTH];         // `rotary_at`
    union {
        float scores[WARPS][GROUPS * HEADS][SCORE_ROW];
        float results[GROUPS][CLUSTER][WARPS]
                     [SLICE_WIDTH];   // by block: of this block's heads, when all have read their last scores
    };
    float peaks[GROUPS][CLUSTER][2];   // beside them: peak, sum of weights
    const uint8_t* from[KEYS];         // rows of keys; null: none
    uint8_t scale_codes[KEYS][SCALES];
    float scales[ROPE_WARP][KEYS];
    uint16_t relative[ROPE_WARP][KEYS];                // FP16: of the largest scale
    uint16_t weights[2][GROUPS * HEADS][WEIGHT_ROW];   // FP16, BF16
    float squares[WARPS][GROUPS * HEADS], shrink[GROUPS * HEADS];
    Inbox inbox;   // of results and peaks

    // Part 0 .. 3 of a key's 64 codes, 0 .. 7 of its rotary channels.
    __device__ __forceinline__ uint8_t* code_at(int slice, int key, int part) {
        return codes[slice][key] + ((part ^ key >> 1 & 3) << 4);
    }
    __device__ __forceinline__ uint8_t* rotary_at(int key, int part) {
        return rotary[key] + ((part ^ key & 7) << 4);
    }
};

// Larger numbers have larger keys; NaN has none.
__device__ __forceinline__ uint32_t peak_key(float v) {
    const uint32_t bits = __float_as_uint(v);
    return v != v ? 0 : bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float from_peak_key(uint32_t key) {
    return key == 0 ? -INFINITY : __uint_as_float(key & 0x80000000u ? key ^ 0x80000000u : ~key);
}
// What is subtracted from scores: a number, also where the peak is none.
__device__ __forceinline__ float finite_peak(float peak) { return peak == -INFINITY ? 0.f : peak; }
__device__ __forceinline__ float e8m0_power(uint32_t code) {
    return __uint_as_float(code == 255 ? 0x7FC00000u : code << 23);
}
// 2^-below in FP16.
__device__ __forceinline__ uint16_t f16_power(int below) {
    return (uint16_t)(below < 15 ? (15 - below) << 10 : below < 25 ? 1 << (24 - below) : 0);
}

// A row's keys, the window's first; this block has `own` of them from `first` on.
struct Keys {
    int slot, position, raw, oldest, first, own, blocks;   // oldest: in the ring; blocks: that have keys

    __device__ __forceinline__ Keys(const Attention& p, int row, int block) {
        position = (int)__ldcg(p.positions + row);
        slot = (int)__ldcg(p.slots + row);
        const int end = p.ends ? (int)__ldcg(p.ends + row) : position;
        raw = min(end + 1, p.window);
        int visible = p.entries ? (end + 1) >> p.ratio_bits : 0;
        if (p.ends) visible = position < 0 ? 0 : p.list_width;
        const int count = raw + (p.listed ? min(visible, p.list_width) : visible);
        const int share = ((count + 15) / 16 + CLUSTER - 1) / CLUSTER * 16;
        oldest = (end + 1 - raw) % p.ring_rows;
        first = share * block;
        own = max(0, min(count - first, share));
        blocks = 0;
#pragma unroll
        for (int i = 0; i < CLUSTER; ++i) blocks += count > share * i;
    }
    __device__ __forceinline__ bool in_ring(int i) const { return first + i < raw; }
    // The row of the block's key `i` in its store, -1: none.
    __device__ __forceinline__ int row(const Attention& p, int row, int i) const {
        if (i >= own) return -1;
        const int place = first + i, entry = place - raw;
        if (entry < 0)
            return slot * p.ring_rows + oldest + place - (oldest + place >= p.ring_rows ? p.ring_rows : 0);
        if (p.listed) return __ldcg(p.listed + (int64_t)row * p.list_width + entry);
        const int page = __ldcg(p.page_table + (int64_t)slot * p.pages + (entry >> p.page_bits));
        return row_of_entry(page, entry, p.page_bits);
    }
};

__device__ __forceinline__ uint32_t word_of(const uint4& v, int i) {
    return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
}
__device__ __forceinline__ float part_of(const float4& v, int i) {
    return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
}

// Queries of a warp's 64 channels: of head g 16 channels a lane, as pairs. Normed, rotated, and for codes in
// FP16.
template <int GROUPS>
__device__ __forceinline__ void prepare_queries(const Attention& p, Memory<GROUPS>& s, uint4 (&q)[GROUPS][2],
                                                const float4 (&turn)[4], int warp, int lane) {
    const int g = lane >> 2, t = lane & 3;
#pragma unroll
    for (int h = 0; h < GROUPS; ++h) {
        float square = 0.f;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const float2 pair = open_bf16(word_of(q[h][i / 4], i % 4));
            square += pair.x * pair.x;
            square += pair.y * pair.y;
        }
        square += __shfl_xor_sync(~0u, square, 1);
        square += __shfl_xor_sync(~0u, square, 2);
        if (t == 0) s.squares[warp][h * HEADS + g] = square;
    }
    __syncthreads();
#pragma unroll
    for (int h = 0; h < GROUPS; ++h) {
        float sum = 0.f;
#pragma unroll
        for (int w = 0; w < WARPS; ++w) sum += s.squares[w][h * HEADS + g];
        const float factor = rsqrtf(sum * (1.f / WIDTH) + p.eps);
        uint32_t word[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const float2 pair = open_bf16(word_of(q[h][i / 4], i % 4));
            word[i] = pack_bf16(pair.x * factor, pair.y * factor);
            const float2 a = open_bf16(word[i]);
            if (warp == ROPE_WARP) {
                const float c = part_of(turn[i / 4], i % 4), d = part_of(turn[2 + i / 4], i % 4);
                word[i] = pack_bf16(a.x * c - a.y * d, a.x * d + a.y * c);
            } else {
                word[i] = pack_f16(a.x, a.y);   // exact from 2^-17 on
            }
        }
        q[h][0] = make_uint4(word[0], word[1], word[2], word[3]);
        q[h][1] = make_uint4(word[4], word[5], word[6], word[7]);
    }
}

// Scores of 16 keys over the warp's 64 channels. A lane has 16 channels in a row of keys g and g + 8, as of
// its queries.
template <bool IS_ROPE, int GROUPS>
__device__ __forceinline__ void score_keys(Memory<GROUPS>& s, const uint4 (&q)[GROUPS][2], int group,
                                           int warp, int lane) {
    const int g = lane >> 2, t = lane & 3, key = group * 16 + g;
    float d[GROUPS][2][4] = {};     // two chains
    uint4 of[2][IS_ROPE ? 2 : 1];   // by key, half
#pragma unroll
    for (int k = 0; k < 2; ++k)
#pragma unroll
        for (int half = 0; half < (IS_ROPE ? 2 : 1); ++half)
            of[k][half] = *reinterpret_cast<const uint4*>(IS_ROPE ? s.rotary_at(key + 8 * k, 2 * t + half)
                                                                  : s.code_at(warp, key + 8 * k, t));
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        uint32_t a[4];
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            if constexpr (IS_ROPE) a[k] = word_of(of[k & 1][j / 2], j % 2 * 2 + k / 2);
            else a[k] = e4m3x2((uint16_t)(word_of(of[k & 1][0], j) >> k / 2 * 16));
        }
#pragma unroll
        for (int h = 0; h < GROUPS; ++h) {
            const uint32_t b0 = word_of(q[h][j / 2], j % 2 * 2), b1 = word_of(q[h][j / 2], j % 2 * 2 + 1);
            if constexpr (IS_ROPE) multiply_bf16(d[h][j & 1], a, b0, b1);
            else multiply_f16(d[h][j & 1], a, b0, b1);
        }
    }
#pragma unroll
    for (int k = 0; k < 2; ++k) {
        float scale = 1.f;
        if constexpr (!IS_ROPE) scale = s.scales[warp][key + 8 * k];
#pragma unroll
        for (int h = 0; h < GROUPS; ++h)
#pragma unroll
            for (int i = 0; i < 2; ++i)
                s.scores[warp][h * HEADS + 2 * t + i][key + 8 * k] =
                    (d[h][0][2 * k + i] + d[h][1][2 * k + i]) * scale;
    }
}

// The warp's 64 channels of 16 keys, weighted, added to d: by 16 channels; of those d has 2g (0, 1) and 2g +
// 1 (2, 3), of rotary ones g and g + 8.
template <bool IS_ROPE, int GROUPS>
__device__ __forceinline__ void add_values(Memory<GROUPS>& s, float (&d)[GROUPS][4][4], int group, int warp,
                                           int lane) {
    const int g = lane >> 2, t = lane & 3,
              key = group * 16 + (lane & 15);   // `key`: whose address this lane has, and which of two parts
    uint32_t b[GROUPS][2], unit[2];
#pragma unroll
    for (int k = 0; k < 2; ++k) {
        const int pair = group * 16 + k * 8 + 2 * t;
#pragma unroll
        for (int h = 0; h < GROUPS; ++h)
            b[h][k] = *reinterpret_cast<const uint32_t*>(&s.weights[IS_ROPE][h * HEADS + g][pair]);
        if constexpr (!IS_ROPE) unit[k] = *reinterpret_cast<const uint32_t*>(&s.relative[warp][pair]);
    }
#pragma unroll
    for (int c = 0; c < 4; ++c) {
        uint32_t a[4];
        if constexpr (IS_ROPE) {
            uint32_t r[4];
            load_transposed(r, s.rotary_at(key, 2 * c + (lane >> 4)));
            a[0] = r[0];
            a[1] = r[2];
            a[2] = r[1];
            a[3] = r[3];
        } else {
            uint32_t r[2];   // keys 0 .. 7, 8 .. 15; a word: keys 2t and 2t + 1, two channels of each
            load_transposed(r, s.code_at(warp, key, c));
#pragma unroll
            for (int k = 0; k < 2; ++k) {
                const __half2 by = *reinterpret_cast<const __half2*>(&unit[k]);
                a[2 * k] = times(e4m3x2((uint16_t)__byte_perm(r[k], 0, 0x4420)), by);
                a[2 * k + 1] = times(e4m3x2((uint16_t)__byte_perm(r[k], 0, 0x4431)), by);
            }
        }
#pragma unroll
        for (int h = 0; h < GROUPS; ++h) {
            if constexpr (IS_ROPE) multiply_bf16(d[h][c], a, b[h][0], b[h][1]);
            else multiply_f16(d[h][c], a, b[h][0], b[h][1]);
        }
    }
}
