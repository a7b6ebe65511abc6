// Decode step: attention of one row, from the queries as their product left them to the rotated-back result, in one launch.
//
// A cluster of blocks takes HEADS * TILES heads; its blocks cut the keys evenly, 16 at a time (split-KV), by the row's position
// alone. Of a block's keys each warp has 64 channels, as keys and as values: it copies, decodes and multiplies those without
// waiting for another. Only scores change hands inside a block, only results inside a cluster: the block of a head sums them up.
//
// Codes are exact in FP16; a score's slice of 64 channels is multiplied by its key's scale in float32, values by their scale
// relative to the largest. Weights of keys are rounded to FP16 (rotary channels: BF16), relative to the block's peak.
#include "cluster.cuh"
#include "fragments.cuh"

constexpr int CLUSTER = 8, WARPS = 8, HEADS = 8, WIDTH = 512, SLICE_WIDTH = 64, ROPE_WARP = 7, HALF = 32;
constexpr int MANY = 5, FEW = 2, KEYS = 16 * MANY;   // groups of 16 keys: all of a pass are multiplied, or the first few
constexpr int PER_LANE = (KEYS + 31) / 32;
constexpr int ROW = 448 + 2 * 64, SCALES = 8;        // bytes of a KV8 row
constexpr int SCORE_ROW = KEYS + 4, WEIGHT_ROW = KEYS + 8;   // no two lanes meet in a bank
constexpr float LOG2E = 1.4426950408889634f;

struct Attention {
    const __nv_bfloat16* q;              // [rows][heads][WIDTH], neither normed nor rotated
    const uint8_t *ring, *ring_scale;    // KV8
    const uint8_t *entries, *entries_scale;
    const int* listed;                   // [rows][list_width] rows of `entries`; null: all that the row sees, by page
    const int* page_table;               // [slots][pages]
    const int64_t *slots, *positions;    // [rows]
    const float *sinks, *cos, *sin;      // [heads], [positions][HALF]
    __nv_bfloat16* out;                  // as q
    int heads, window, ring_rows, list_width, ratio, page_entries, pages;
    float scale, eps;
};

template <int TILES> struct Memory {
    uint8_t codes[ROPE_WARP][KEYS][SLICE_WIDTH];   // 16 bytes swizzled: `code_at`
    uint8_t rotary[KEYS][2 * SLICE_WIDTH];         // `rotary_at`
    float results[CLUSTER][TILES][WIDTH];          // by block: of this block's heads
    float peaks[CLUSTER][TILES][2];                // beside them: peak, sum of weights
    float scores[WARPS][TILES * HEADS][SCORE_ROW];
    float scales[ROPE_WARP][KEYS];
    uint16_t relative[ROPE_WARP][KEYS];            // FP16: of the largest scale
    uint16_t weights[2][TILES * HEADS][WEIGHT_ROW];   // FP16, BF16
    float squares[WARPS][TILES * HEADS], shrink[TILES * HEADS];

    // Part 0 .. 3 of a key's 64 codes, 0 .. 7 of its rotary channels.
    __device__ __forceinline__ uint8_t* code_at(int slice, int key, int part) { return codes[slice][key] + ((part ^ key >> 1 & 3) << 4); }
    __device__ __forceinline__ uint8_t* rotary_at(int key, int part) { return rotary[key] + ((part ^ key & 7) << 4); }
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
__device__ __forceinline__ float e8m0_power(uint32_t code) { return __uint_as_float(code == 255 ? 0x7FC00000u : code << 23); }
// 2^-below in FP16.
__device__ __forceinline__ uint16_t f16_power(int below) {
    return (uint16_t)(below < 15 ? (15 - below) << 10 : below < 25 ? 1 << (24 - below) : 0);
}

// A row's keys, the window's first; this block has `own` of them from `first` on.
struct Keys {
    int64_t slot;
    int position, raw, first, own;

    __device__ __forceinline__ Keys(const Attention& p, int row, int block) {
        position = (int)__ldcg(p.positions + row);
        slot = __ldcg(p.slots + row);
        raw = min(position + 1, p.window);
        const int visible = p.entries ? (position + 1) / p.ratio : 0;
        const int count = raw + (p.listed ? min(visible, p.list_width) : visible);
        const int share = ((count + 15) / 16 + CLUSTER - 1) / CLUSTER * 16;
        first = share * block;
        own = max(0, min(count - first, share));
    }
    // The row of the block's key `i` in its store, -1: none.
    __device__ __forceinline__ int64_t row(const Attention& p, int row, int i) const {
        if (i >= own) return -1;
        const int place = first + i, entry = place - raw;
        if (entry < 0) return slot * p.ring_rows + (position + 1 + entry) % p.ring_rows;
        if (p.listed) return __ldcg(p.listed + (int64_t)row * p.list_width + entry);
        return (int64_t)__ldcg(p.page_table + slot * p.pages + entry / p.page_entries) * p.page_entries + entry % p.page_entries;
    }
    __device__ __forceinline__ bool in_ring(int i) const { return first + i < raw; }
};

// Queries of a warp's 64 channels: of head g 16 channels a lane, as pairs. Normed, rotated, and for codes in FP16.
template <int TILES>
__device__ __forceinline__ void prepare_queries(const Attention& p, Memory<TILES>& s, uint4 (&q)[TILES][2], float4 (&turn)[4], int warp, int lane) {
    const int g = lane >> 2, t = lane & 3;
    float v[TILES][16];
#pragma unroll
    for (int n = 0; n < TILES; ++n) {
        float square = 0.f;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const uint4 half = q[n][i / 4];
            const float2 pair = open_bf16(i % 4 == 0 ? half.x : i % 4 == 1 ? half.y : i % 4 == 2 ? half.z : half.w);
            v[n][2 * i] = pair.x;
            v[n][2 * i + 1] = pair.y;
            square += pair.x * pair.x;
            square += pair.y * pair.y;
        }
        square += __shfl_xor_sync(~0u, square, 1);
        square += __shfl_xor_sync(~0u, square, 2);
        if (t == 0) s.squares[warp][n * HEADS + g] = square;
    }
    __syncthreads();
#pragma unroll
    for (int n = 0; n < TILES; ++n) {
        float sum = 0.f;
#pragma unroll
        for (int w = 0; w < WARPS; ++w) sum += s.squares[w][n * HEADS + g];
        const float factor = __fdiv_rn(1.f, __fsqrt_rn(sum * (1.f / WIDTH) + p.eps));
        uint32_t word[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            word[i] = pack_bf16(v[n][2 * i] * factor, v[n][2 * i + 1] * factor);
            const float2 a = open_bf16(word[i]);
            if (warp == ROPE_WARP) {
                const float4 c4 = turn[i / 4], s4 = turn[2 + i / 4];
                const float c = i % 4 == 0 ? c4.x : i % 4 == 1 ? c4.y : i % 4 == 2 ? c4.z : c4.w;
                const float d = i % 4 == 0 ? s4.x : i % 4 == 1 ? s4.y : i % 4 == 2 ? s4.z : s4.w;
                word[i] = pack_bf16(a.x * c - a.y * d, a.x * d + a.y * c);
            } else {
                word[i] = pack_f16(a.x, a.y);   // exact from 2^-17 on
            }
        }
        q[n][0] = make_uint4(word[0], word[1], word[2], word[3]);
        q[n][1] = make_uint4(word[4], word[5], word[6], word[7]);
    }
}

__device__ __forceinline__ uint32_t word_of(const uint4& v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }

// Scores of the first N * 16 keys over the warp's 64 channels. A lane has 16 channels in a row of keys g and g + 8 of each group,
// as of its queries.
template <int TILES, bool IS_ROPE, int N>
__device__ __forceinline__ void score_keys(Memory<TILES>& s, const uint4 (&q)[TILES][2], int warp, int lane) {
    const int g = lane >> 2, t = lane & 3;
    float d[N][TILES][4];
    uint4 of[N][2][IS_ROPE ? 2 : 1];   // by key, half
#pragma unroll
    for (int i = 0; i < N; ++i) {
#pragma unroll
        for (int n = 0; n < TILES; ++n) d[i][n][0] = d[i][n][1] = d[i][n][2] = d[i][n][3] = 0.f;
#pragma unroll
        for (int k = 0; k < 2; ++k)
#pragma unroll
            for (int half = 0; half < (IS_ROPE ? 2 : 1); ++half) {
                const int key = i * 16 + k * 8 + g;
                of[i][k][half] = *reinterpret_cast<const uint4*>(IS_ROPE ? s.rotary_at(key, 2 * t + half) : s.code_at(warp, key, t));
            }
    }
#pragma unroll
    for (int j = 0; j < 4; ++j)
#pragma unroll
        for (int i = 0; i < N; ++i) {
            uint32_t a[4];
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                if constexpr (IS_ROPE) a[k] = word_of(of[i][k & 1][j / 2], j % 2 * 2 + k / 2);
                else a[k] = e4m3x2((uint16_t)(word_of(of[i][k & 1][0], j) >> k / 2 * 16));
            }
#pragma unroll
            for (int n = 0; n < TILES; ++n) {
                const uint32_t b0 = word_of(q[n][j / 2], j % 2 * 2), b1 = word_of(q[n][j / 2], j % 2 * 2 + 1);
                if constexpr (IS_ROPE) multiply_bf16(d[i][n], a, b0, b1);
                else multiply_f16(d[i][n], a, b0, b1);
            }
        }
#pragma unroll
    for (int i = 0; i < N; ++i)
#pragma unroll
        for (int k = 0; k < 2; ++k) {
            const int key = i * 16 + k * 8 + g;
            float scale = 1.f;
            if constexpr (!IS_ROPE) scale = s.scales[warp][key];
#pragma unroll
            for (int n = 0; n < TILES; ++n) {
                s.scores[warp][n * HEADS + 2 * t][key] = d[i][n][2 * k] * scale;
                s.scores[warp][n * HEADS + 2 * t + 1][key] = d[i][n][2 * k + 1] * scale;
            }
        }
}

// The warp's 64 channels of the first N * 16 keys, weighted: by 16 channels; of those d has 2g (0, 1) and 2g + 1 (2, 3), of rotary
// ones g and g + 8.
template <int TILES, bool IS_ROPE, int N>
__device__ __forceinline__ void add_values(Memory<TILES>& s, float (&d)[4][TILES][4], int warp, int lane) {
    const int g = lane >> 2, t = lane & 3;
#pragma unroll
    for (int i = 0; i < N; ++i) {
        const int key = i * 16 + (lane & 15);   // whose address this lane has, and which of two parts
        uint32_t b[TILES][2], unit[2];
#pragma unroll
        for (int k = 0; k < 2; ++k) {
#pragma unroll
            for (int n = 0; n < TILES; ++n) b[n][k] = *reinterpret_cast<const uint32_t*>(&s.weights[IS_ROPE][n * HEADS + g][i * 16 + k * 8 + 2 * t]);
            if constexpr (!IS_ROPE) unit[k] = *reinterpret_cast<const uint32_t*>(&s.relative[warp][i * 16 + k * 8 + 2 * t]);
        }
#pragma unroll
        for (int c = 0; c < 4; ++c) {
            uint32_t a[4];
            if constexpr (IS_ROPE) {
                uint32_t r[4];
                load_transposed(r, s.rotary_at(key, 2 * c + (lane >> 4)));
                a[0] = r[0]; a[1] = r[2]; a[2] = r[1]; a[3] = r[3];
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
            for (int n = 0; n < TILES; ++n) {
                if constexpr (IS_ROPE) multiply_bf16(d[c][n], a, b[n][0], b[n][1]);
                else multiply_f16(d[c][n], a, b[n][0], b[n][1]);
            }
        }
    }
}

template <int TILES>
__global__ void __launch_bounds__(WARPS * 32, TILES == 1 ? 2 : 1) attention_kernel(const Attention p) {
    Memory<TILES>& s = *(Memory<TILES>*)shared_memory();
    launch_dependents();
    all_started();   // waited for before the first write to another block: by then that block runs
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    const int block = blockIdx.x % CLUSTER, groups = p.heads / (HEADS * TILES);
    const int row = blockIdx.x / CLUSTER / groups, first_head = blockIdx.x / CLUSTER % groups * (HEADS * TILES);
    const Keys keys(p, row, block);
    const bool is_rope = warp == ROPE_WARP;

    int64_t at[PER_LANE];     // rows of keys lane, lane + 32, ...
    uint32_t code[PER_LANE];  // and their scales
    const auto fetch = [&](int begin) {
#pragma unroll
        for (int i = 0; i < PER_LANE; ++i) {
            const int key = lane + 32 * i;
            at[i] = key < KEYS ? keys.row(p, row, begin + key) : -1;
            const uint8_t* scales = keys.in_ring(begin + key) ? p.ring_scale : p.entries_scale;
            code[i] = at[i] >= 0 && !is_rope ? __ldcg(scales + at[i] * SCALES + warp) : 0;
        }
        // 16 bytes a lane, of eight keys at a time; zeros where there is no key.
#pragma unroll
        for (int i = 0; i < KEYS / 8; ++i) {
            if (i == FEW * 2 && keys.own - begin <= FEW * 16) break;
            const int key = i * 8 + g;
            const int64_t from = __shfl_sync(~0u, i < 4 ? at[0] : i < 8 ? at[1] : at[2], key & 31);
            const uint8_t* data = (keys.in_ring(begin + key) ? p.ring : p.entries) + max(from, (int64_t)0) * ROW;
            if (is_rope) {
                copy16(s.rotary_at(key, t), data + ROPE_WARP * SLICE_WIDTH + t * 16, from >= 0);
                copy16(s.rotary_at(key, t + 4), data + ROPE_WARP * SLICE_WIDTH + (t + 4) * 16, from >= 0);
            } else {
                copy16(s.code_at(warp, key, t), data + warp * SLICE_WIDTH + t * 16, from >= 0);
            }
        }
    };
    // Keys that are known before the selection, hence written before the launch that precedes this one.
    const bool is_known = !p.listed || keys.in_ring(keys.own - 1);
    if (is_known) fetch(0);
    const float *cos = p.cos + (int64_t)max(keys.position, 0) * HALF, *sin = p.sin + (int64_t)max(keys.position, 0) * HALF;
    float4 turn[4];   // cos, sin of a lane's 16 rotary channels
    float back_cos = 1.f, back_sin = 0.f;
    if (is_rope) {
#pragma unroll
        for (int i = 0; i < 4; ++i) turn[i] = __ldg(reinterpret_cast<const float4*>((i < 2 ? cos : sin) + t * 8) + (i & 1));
        back_cos = __ldg(cos + lane);
        back_sin = __ldg(sin + lane);
    }
    float sink[TILES];
#pragma unroll
    for (int n = 0; n < TILES; ++n) sink[n] = __ldg(p.sinks + first_head + n * HEADS + block) * LOG2E;
    wait_for_prerequisites();
    uint4 q[TILES][2];
#pragma unroll
    for (int n = 0; n < TILES; ++n)
#pragma unroll
        for (int half = 0; half < 2; ++half)
            q[n][half] = __ldcg(reinterpret_cast<const uint4*>(p.q + ((int64_t)row * p.heads + first_head + n * HEADS + g) * WIDTH + warp * SLICE_WIDTH + t * 16) + half);
    if (!is_known) fetch(0);
    prepare_queries<TILES>(p, s, q, turn, warp, lane);

    float peak[TILES], total[TILES], result[4][TILES][4];   // peak and total: of head `warp` of each tile
#pragma unroll
    for (int n = 0; n < TILES; ++n) {
        peak[n] = -INFINITY;
        total[n] = 0.f;
#pragma unroll
        for (int i = 0; i < 16; ++i) result[i / 4][n][i % 4] = 0.f;
    }
#pragma unroll 1
    for (int begin = 0; begin < keys.own; begin += KEYS) {
        if (begin) fetch(begin);
        const bool is_few = keys.own - begin <= FEW * 16;
        uint32_t largest = 0;
        if (!is_rope) {
#pragma unroll
            for (int i = 0; i < PER_LANE; ++i) largest = max(largest, code[i] == 255 ? 0u : code[i]);
            largest = __reduce_max_sync(~0u, largest);
#pragma unroll
            for (int i = 0; i < PER_LANE; ++i) {
                const int key = lane + 32 * i;
                if (key >= KEYS) continue;
                s.scales[warp][key] = e8m0_power(code[i]);
                s.relative[warp][key] = at[i] < 0 ? 0 : code[i] == 255 ? 0x7E00 : f16_power((int)largest - (int)code[i]);
            }
        }
        await_copies();
        __syncwarp();
        if (is_rope) is_few ? score_keys<TILES, true, FEW>(s, q, warp, lane) : score_keys<TILES, true, MANY>(s, q, warp, lane);
        else is_few ? score_keys<TILES, false, FEW>(s, q, warp, lane) : score_keys<TILES, false, MANY>(s, q, warp, lane);
        __syncthreads();
        // A warp has a head of each tile; a lane every 32nd key.
        float sum[TILES];
#pragma unroll
        for (int n = 0; n < TILES; ++n) {
            const int head = n * HEADS + warp;
            float score[PER_LANE];
            uint32_t best = 0;
#pragma unroll
            for (int i = 0; i < PER_LANE; ++i) {
                const int key = lane + 32 * i;
                score[i] = -INFINITY;
                if (at[i] < 0) continue;
                float v = 0.f;
#pragma unroll
                for (int w = 0; w < WARPS; ++w) v += s.scores[w][head][key];
                score[i] = v * (p.scale * LOG2E);
                best = max(best, peak_key(score[i]));
            }
            const float higher = fmaxf(peak[n], from_peak_key(__reduce_max_sync(~0u, best)));
            const float base = finite_peak(higher), shrink = power_of_two(peak[n] - base);
            sum[n] = 0.f;
#pragma unroll
            for (int i = 0; i < PER_LANE; ++i) {
                const int key = lane + 32 * i;
                const float weight = at[i] < 0 ? 0.f : power_of_two(score[i] - base);
                sum[n] += weight;
                if (key < KEYS) {
                    s.weights[0][head][key] = (uint16_t)pack_f16(weight, 0.f);
                    s.weights[1][head][key] = (uint16_t)pack_bf16(weight, 0.f);
                }
            }
            if (lane == 0) s.shrink[head] = shrink;
            total[n] *= shrink;
            peak[n] = higher;
        }
        __syncthreads();
        float d[4][TILES][4];
#pragma unroll
        for (int i = 0; i < 16 * TILES; ++i) d[i / 4 % 4][i / 16][i % 4] = 0.f;
        if (is_rope) is_few ? add_values<TILES, true, FEW>(s, d, warp, lane) : add_values<TILES, true, MANY>(s, d, warp, lane);
        else is_few ? add_values<TILES, false, FEW>(s, d, warp, lane) : add_values<TILES, false, MANY>(s, d, warp, lane);
#pragma unroll
        for (int n = 0; n < TILES; ++n) {
#pragma unroll
            for (int i = 16; i; i /= 2) sum[n] += __shfl_xor_sync(~0u, sum[n], i);
            total[n] += sum[n];
        }
        const float unit = is_rope ? 1.f : __uint_as_float(largest << 23);
#pragma unroll
        for (int n = 0; n < TILES; ++n)
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const float shrink = s.shrink[n * HEADS + 2 * t + j];
#pragma unroll
                for (int c = 0; c < 4; ++c) {
                    result[c][n][j] = result[c][n][j] * shrink + d[c][n][j] * unit;
                    result[c][n][2 + j] = result[c][n][2 + j] * shrink + d[c][n][2 + j] * unit;
                }
            }
    }
    all_wait();
    // Block b sums up head b of each tile.
#pragma unroll
    for (int n = 0; n < TILES; ++n) {
        if (keys.own)
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                float* to = in_block(&s.results[block][n][warp * SLICE_WIDTH + 2 * g], 2 * t + j);
#pragma unroll
                for (int c = 0; c < 4; ++c) *reinterpret_cast<float2*>(to + 16 * c) = make_float2(result[c][n][j], result[c][n][2 + j]);
            }
        if (lane == 0) *reinterpret_cast<float2*>(in_block(&s.peaks[block][n][0], warp)) = make_float2(peak[n], total[n]);
    }
    all_sync();
    // A thread has channels 2 i and 2 i + 1 of each head; those of the rotary warp lie as `add_values` says.
    const int pair = lane & 7, low = warp * SLICE_WIDTH + (is_rope ? lane / 8 * 16 + (pair & 3) * 4 + pair / 4 : 2 * lane), high = low + (is_rope ? 2 : 1);
#pragma unroll
    for (int n = 0; n < TILES; ++n) {
        float top = sink[n], whole = 0.f, x = 0.f, y = 0.f;
#pragma unroll
        for (int b = 0; b < CLUSTER; ++b)
            if (s.peaks[b][n][1] != 0.f) top = fmaxf(top, s.peaks[b][n][0]);
        top = finite_peak(top);
#pragma unroll
        for (int b = 0; b < CLUSTER; ++b) {
            const float sum = s.peaks[b][n][1];
            if (sum == 0.f) continue;   // without keys; its results were not written
            const float weight = power_of_two(s.peaks[b][n][0] - top);
            whole += weight * sum;
            x += weight * s.results[b][n][low];
            y += weight * s.results[b][n][high];
        }
        whole += power_of_two(sink[n] - top);
        const bool is_padding = keys.position < 0;
        const float2 v = open_bf16(pack_bf16(is_padding ? 0.f : __fdiv_rn(x, whole), is_padding ? 0.f : __fdiv_rn(y, whole)));
        const uint32_t pairs = is_rope ? pack_bf16(v.x * back_cos + v.y * back_sin, v.y * back_cos - v.x * back_sin) : pack_bf16(v.x, v.y);
        const int64_t to = ((int64_t)row * p.heads + first_head + n * HEADS + block) * WIDTH + warp * SLICE_WIDTH + 2 * lane;
        *reinterpret_cast<uint32_t*>(p.out + to) = pairs;
    }
}

#ifdef __CUDACC__
// What attention.py launches.
static_assert(sizeof(Memory<1>) == 90496 && sizeof(Memory<2>) == 131552);
template __global__ void attention_kernel<1>(const Attention);
template __global__ void attention_kernel<2>(const Attention);
#endif
