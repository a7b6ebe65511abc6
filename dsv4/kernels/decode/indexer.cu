// Decode step: a CSA layer's choice of entries for one row, from the index queries as their product left them to the list of
// pool rows, in one launch. One cluster of blocks per row.
//
// Each warp rotates, transforms and rounds one head's query and hands it to all blocks; then it scores 16 keys at a time against
// all heads, and block 0 chooses among all scores (select.cuh). As in attention.cu, code is kept short.
#include "cluster.cuh"
#include "fragments.cuh"
#include "select.cuh"

constexpr int CLUSTER = 8, WARPS = 8, HEADS = CLUSTER * WARPS, CHANNELS = 128, HALF = 32;
constexpr int KEY_BYTES = CHANNELS / 2, KEY_SCALES = CHANNELS / 32;   // MXFP4
constexpr int ENTRY_BYTES = 576, ENTRY_SCALES = 8;                    // KV8, what attention reads of an entry
constexpr int PREFETCHED = 4096;   // entries: 2.4 MB; a row with more chooses too small a part of them
// Keys enter the product 2^63 too small, which is exact (scales of 2^-62 to 2^64): one factor per value then does for two, since
// 2^126, by which a code's bits are too small, and the scale would overflow together.
constexpr int LIFT = 63;
constexpr float MAX_FLOAT = 3.4028234663852886e38f;

struct Indexing {
    const __nv_bfloat16* iq;        // [rows][HEADS][CHANNELS], neither rotated nor rounded
    const __nv_bfloat16* weights;   // [rows][HEADS]
    const uint8_t *keys, *key_scale;
    const uint8_t *entries, *entries_scale;   // to be prefetched
    const float *cos, *sin;         // [positions][HALF]
    const int64_t *slots, *positions;   // [rows]
    const int* page_table;          // [slots][pages]
    int* out;                       // [rows][topk]
    int pages, topk, ratio_bits, page_bits;   // powers of two: tokens of an entry, entries of a page
    float factor;

    // Where a row's entry lies in the pool.
    __device__ __forceinline__ int place(const int* row_pages, int entry) const {
        return (__ldcg(row_pages + (entry >> page_bits)) << page_bits) + (entry & ((1 << page_bits) - 1));
    }
};

template <int KEYS> struct Memory {   // KEYS: of a lane of block 0, which chooses
    uint4 queries[HEADS][CHANNELS / 8];   // BF16, as `score` reads them
    uint32_t order[WARPS * 32 * KEYS];
    uint2 tallies[2][WARPS];
    Inbox queries_inbox, order_inbox;
};

__device__ __forceinline__ float power(int code) { return __uint_as_float((code & 255) == 255 ? 0x7FC00000u : (uint32_t)code << 23); }

// ops.index.ref.queries of one head, four channels in a row a lane.
__device__ __forceinline__ void round_query(float (&v)[4], float2 cos, float2 sin, int lane) {
    if (lane >= 16) {   // the last 64 channels
        const float2 first = open_bf16(pack_bf16(v[0] * cos.x - v[1] * sin.x, v[0] * sin.x + v[1] * cos.x));
        const float2 second = open_bf16(pack_bf16(v[2] * cos.y - v[3] * sin.y, v[2] * sin.y + v[3] * cos.y));
        v[0] = first.x; v[1] = first.y; v[2] = second.x; v[3] = second.y;
    }
    // Hadamard, the lowest bit of the channel's number first.
    const float a[4] = {v[0] + v[1], v[0] - v[1], v[2] + v[3], v[2] - v[3]};
    v[0] = a[0] + a[2]; v[1] = a[1] + a[3]; v[2] = a[0] - a[2]; v[3] = a[1] - a[3];
#pragma unroll
    for (int bit = 1; bit < 32; bit *= 2)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float other = __shfl_xor_sync(~0u, v[i], bit);
            v[i] = lane & bit ? other - v[i] : v[i] + other;
        }
    // MXFP4: a scale for 32 channels. As integers, the bits of NaN are above those of every number.
    uint32_t top = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float2 rounded = open_bf16(pack_bf16(v[i] * 0.08838834764831845f, 0.f));   // 128^-0.5
        v[i] = at_most(at_least(rounded.x, -MAX_FLOAT), MAX_FLOAT);
        top = max(top, __float_as_uint(v[i]) & 0x7FFFFFFFu);
    }
#pragma unroll
    for (int bit = 1; bit < 8; bit *= 2) top = max(top, __shfl_xor_sync(~0u, top, bit));
    const float share = fmaxf(__uint_as_float(top), 6.f * 1.1754943508222875e-38f) * (1.f / 6.f);
    const int scale = top > 0x7F800000u ? 255 : (int)((__float_as_uint(share) + 0x7FFFFFu) >> 23);
    const float shrink = power(254 - scale), grow = power(scale);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float x = v[i] * shrink, size = fabsf(x);
        // E2M1, nearest, ties to even; NaN: 7, whose scale is NaN.
        int code = (size > 0.25f) + (size > 0.75f - 5.9604644775390625e-8f) + (size > 1.25f) + (size > 1.75f - 1.1920928955078125e-7f) +
                   (size > 2.5f) + (size > 3.5f - 2.384185791015625e-7f) + (size > 5.f);
        if (x != x) code = 7;
        v[i] = __uint_as_float((uint32_t)code << 22 | (__float_as_uint(x) & 0x80000000u)) * 8.507059173023462e37f * grow;
    }
}

// Where `queries` has channels 32 t + 8 v .. + 7 of a head: swizzled, so that no two lanes meet in a bank.
__device__ __forceinline__ int query_part(int head, int t, int v) { return t * 4 + ((v ^ t ^ (head & 1)) & 3); }

struct Key {   // of a lane: 32 channels of one key, and their scale
    uint4 codes;
    uint32_t scale;

    __device__ __forceinline__ void load(const Indexing& p, const int* pages, int key, int count, int t) {
        codes = make_uint4(0, 0, 0, 0);
        scale = 0;
        if (key >= count) return;
        const int64_t row = p.place(pages, key);
        codes = __ldcg(reinterpret_cast<const uint4*>(p.keys + row * KEY_BYTES) + t);
        scale = __ldcg(p.key_scale + row * KEY_SCALES + t);
    }
    // A scale that is NaN, or beyond what LIFT leaves room for, gives NaN.
    __device__ __forceinline__ uint32_t unit() const {
        const uint32_t code = scale + (126 - LIFT);
        return (code >= 255 ? 0x7FC0u : code << 7) * 0x10001u;
    }
};

// Channels i and i + 4 of eight, as BF16, 2^126 too small: a code's three low bits are those of a tiny number.
__device__ __forceinline__ uint32_t code_pair(uint32_t word, int i) {
    const uint32_t size = i == 0 ? word << 6 : i == 1 ? word << 2 : i == 2 ? word >> 2 : word >> 6;
    return (size & 0x01C001C0u) | (word << (12 - 4 * i) & 0x80008000u);
}

// Scores of keys g and g + 8 of a group; all lanes of a row learn them.
template <int KEYS>
__device__ __forceinline__ float2 score(const Memory<KEYS>& s, Key (&keys)[2], const float (&weight)[HEADS / 8][2], int lane) {
    const int g = lane >> 2, t = lane & 3;
    const uint32_t unit[2] = {keys[0].unit(), keys[1].unit()};
    float d[HEADS / 8][4] = {};
#pragma unroll 1
    for (int v = 0; v < 4; ++v) {   // eight channels
        uint32_t a[2][4];
#pragma unroll
        for (int i = 0; i < 8; ++i) a[i / 4][i % 4] = times_bf16(code_pair(keys[i & 1].codes.x, i / 4 * 2 + i % 4 / 2), unit[i & 1]);
#pragma unroll
        for (int k = 0; k < 2; ++k) {
            uint4& codes = keys[k].codes;
            codes.x = codes.y; codes.y = codes.z; codes.z = codes.w;
        }
        const uint4* of = &s.queries[g][query_part(g, t, v)];   // heads 8 n + g: the same part
#pragma unroll
        for (int n = 0; n < HEADS / 8; ++n) {
            const uint4 b = of[n * 8 * (CHANNELS / 8)];
            multiply_bf16(d[n], a[0], b.x, b.y);
            multiply_bf16(d[n], a[1], b.z, b.w);
        }
    }
    float sums[2];
#pragma unroll
    for (int k = 0; k < 2; ++k) {
        float sum = 0.f;
#pragma unroll
        for (int n = 0; n < HEADS / 8; ++n) {
            sum += weight[n][0] * at_least(d[n][2 * k], 0.f);
            sum += weight[n][1] * at_least(d[n][2 * k + 1], 0.f);
        }
        sum += __shfl_xor_sync(~0u, sum, 1);
        sum += __shfl_xor_sync(~0u, sum, 2);
        sums[k] = sum * 9.223372036854775808e18f;   // 2^LIFT
    }
    return make_float2(sums[0], sums[1]);
}

template <int KEYS> __global__ void __launch_bounds__(WARPS * 32) indexer_kernel(const Indexing p) {
    Memory<KEYS>& s = *(Memory<KEYS>*)shared_memory();
    launch_dependents();
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    const int block = blockIdx.x % CLUSTER, row = blockIdx.x / CLUSTER, head = block * WARPS + warp;
    const int position = (int)__ldcg(p.positions + row), count = (position + 1) >> p.ratio_bits;
    const int* pages = p.page_table + __ldcg(p.slots + row) * p.pages;
    int* to = p.out + (size_t)row * p.topk;
    const bool chooses = count > p.topk;   // else all are taken
    if (threadIdx.x == 0) {
        open_inbox(&s.queries_inbox, HEADS * CHANNELS * 2);
        open_inbox(&s.order_inbox, block ? 0 : count * 4);
    }
    all_started();   // waited for before anything is sent
    // Groups of 16 keys go to the cluster's warps in turn.
    int group = block * WARPS + warp;
    Key keys[2];
    if (chooses)
#pragma unroll
        for (int i = 0; i < 2; ++i) keys[i].load(p, pages, group * 16 + i * 8 + g, count, t);
    const int page_entries = 1 << p.page_bits;
    if (count <= PREFETCHED)
#pragma unroll 1
        for (int i = block + threadIdx.x * CLUSTER; i << p.page_bits < count; i += CLUSTER * WARPS * 32) {
            const int64_t first = (int64_t)__ldcg(pages + i) << p.page_bits;
            prefetch_l2(p.entries + first * ENTRY_BYTES, page_entries * ENTRY_BYTES);
            if (page_entries > 1) prefetch_l2(p.entries_scale + first * ENTRY_SCALES, page_entries * ENTRY_SCALES);
        }
    const int64_t angle = (int64_t)max(position, 0) * HALF + 2 * (lane & 15);
    const float2 cos = __ldg(reinterpret_cast<const float2*>(p.cos + angle)), sin = __ldg(reinterpret_cast<const float2*>(p.sin + angle));
    int place[KEYS];   // of the entries from which block 0 chooses
    const int start = warp * KEYS * 32 + lane;
    if (block == 0)
#pragma unroll
        for (int i = 0; i < KEYS; ++i) place[i] = start + i * 32 < count ? p.place(pages, start + i * 32) : -1;
    wait_for_prerequisites();
    if (!chooses) {   // the same for all blocks of the row
        if (block == 0)
#pragma unroll
            for (int i = 0; i < KEYS; ++i)
                if (start + i * 32 < p.topk) to[start + i * 32] = place[i];
        return;
    }
    const uint2 raw = __ldcg(reinterpret_cast<const uint2*>(p.iq + ((int64_t)row * HEADS + head) * CHANNELS) + lane);
    float weight[HEADS / 8][2];
#pragma unroll
    for (int n = 0; n < HEADS / 8; ++n) {
        const float2 two = open_bf16(__ldcg(reinterpret_cast<const uint32_t*>(p.weights + (int64_t)row * HEADS + n * 8 + 2 * t)));
        weight[n][0] = two.x * p.factor;
        weight[n][1] = two.y * p.factor;
    }
    const float2 low = open_bf16(raw.x), high = open_bf16(raw.y);
    float v[4] = {low.x, low.y, high.x, high.y};
    round_query(v, cos, sin, lane);
    // Eight channels are two lanes': the even one gets pairs (0, 4) and (1, 5), the odd one (2, 6) and (3, 7).
    const uint32_t first = pack_bf16(v[0], v[1]), second = pack_bf16(v[2], v[3]);
    const uint32_t other = __shfl_xor_sync(~0u, lane & 1 ? first : second, 1);
    const uint32_t lower = lane & 1 ? other : first, upper = lane & 1 ? second : other;
    const uint2 words = make_uint2(__byte_perm(lower, upper, 0x5410), __byte_perm(lower, upper, 0x7632));
    const uint2* query = reinterpret_cast<const uint2*>(&s.queries[head][query_part(head, lane >> 3, lane >> 1 & 3)]) + (lane & 1);
    all_wait();
#pragma unroll
    for (int b = 0; b < CLUSTER; ++b) send(query, words, b, &s.queries_inbox);
    await_inbox(&s.queries_inbox);
#pragma unroll 1
    for (; group * 16 < count; group += CLUSTER * WARPS) {
        Key next[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) next[i].load(p, pages, (group + CLUSTER * WARPS) * 16 + i * 8 + g, count, t);
        const float2 scores = score<KEYS>(s, keys, weight, lane);
        const int key = group * 16 + t * 8 + g;
        if (t < 2 && key < count) send(&s.order[key], max(order(t ? scores.y : scores.x), 1u), 0, &s.order_inbox);
        __syncwarp();
#pragma unroll
        for (int i = 0; i < 2; ++i) keys[i] = next[i];
    }
    if (block) return;
    await_inbox(&s.order_inbox);
    uint32_t key[KEYS];
#pragma unroll
    for (int i = 0; i < KEYS; ++i) key[i] = start + i * 32 < count ? s.order[start + i * 32] : 0;
    choose_keys<WARPS, KEYS>(p.topk, to, key, [&](int i) { return place[i]; }, s.tallies);
}

#ifdef __CUDACC__
// What indexer.py launches.
static_assert(sizeof(Memory<5>) == 21648 && sizeof(Memory<16>) == 32912 && sizeof(Memory<32>) == 49296);
template __global__ void indexer_kernel<5>(const Indexing);
template __global__ void indexer_kernel<16>(const Indexing);
template __global__ void indexer_kernel<32>(const Indexing);
#endif
