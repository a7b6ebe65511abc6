// Decode step: which entries a row attends to, from the order of their scores. Serves prompts too.
#pragma once
#ifdef __CUDACC__
#include "launch.cuh"
#endif

// Larger floats have larger keys; both zeros have one; NaN's is the largest, whatever its sign, as torch sorts.
__device__ __forceinline__ uint32_t order(float v) {
    const uint32_t bits = __float_as_uint(v == 0.f ? 0.f : v);
    return v != v ? ~0u : bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// The `topk` largest of a row's first `count` scores, the lower index on a tie, in rising order, as places in the pool;
// -1 beyond. The key of the last one taken is found two bits at a time by counting.
struct Choice {
    const float* scores;        // [rows][stride]
    int64_t stride;
    const int64_t* positions;   // [rows]
    int ratio;
    const int* page_table;      // [slots][pages]
    const int64_t* slots;       // [rows]
    int pages, page_entries, topk;
    int fewest, most;           // entries of a row that this launch chooses from; other rows are another launch's
    int* out;                   // [rows][topk]

    __device__ __forceinline__ int count(int row) const { return (int)((__ldcg(positions + row) + 1) / ratio); }
    __device__ __forceinline__ const int* pages_of(int row) const { return page_table + __ldcg(slots + row) * pages; }
    __device__ __forceinline__ int place(const int* table, int entry) const {
        return table[entry / page_entries] * page_entries + entry % page_entries;
    }
};

// t1, t2 and t3 keys are at least one, two and three: the largest of these that is no larger than the topk'th key becomes the
// prefix. True when it is found early: then exactly the wanted keys are larger than the prefix.
__device__ __forceinline__ bool narrow(uint32_t& prefix, uint32_t one, uint32_t two, uint32_t three, uint32_t t1, uint32_t t2, uint32_t t3,
                                       int topk) {
    const uint32_t reached = t3 >= topk ? t3 : t2 >= topk ? t2 : t1;
    if (t3 >= topk) prefix = three;
    else if (t2 >= topk) prefix = two;
    else if (t1 >= topk) prefix = one;
    else return false;
    if (reached != topk) return false;
    --prefix;
    return true;
}

// All threads of a block choose from more than `topk` keys, KEYS of a lane, a warp's in a row; 0, below every score's, beyond the
// last. `place(i)`: where the entry of the lane's key i lies. `tallies`: shared memory that no thread still reads.
template <int WARPS, int KEYS, typename Place>
__device__ __forceinline__ void choose_keys(int topk, int* to, const uint32_t (&key)[KEYS], const Place& place, uint2 (&tallies)[2][WARPS]) {
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    // Sums over the block of two numbers that fit 16 bits, and a third.
    int turn = 0;
    const auto everywhere = [&](uint32_t two, uint32_t third) {
        two = __reduce_add_sync(~0u, two);
        third = __reduce_add_sync(~0u, third);
        if (lane == 0) tallies[turn & 1][warp] = make_uint2(two, third);
        __syncthreads();
        uint2 total = make_uint2(0, 0);
#pragma unroll
        for (int w = 0; w < WARPS; ++w) {
            const uint2 of = tallies[turn & 1][w];
            total.x += of.x; total.y += of.y;
        }
        ++turn;
        return total;
    };
    // The first digit in which keys differ; above it all have the same.
    uint32_t common = ~0u, any = 0;
#pragma unroll
    for (int i = 0; i < KEYS; ++i) {
        if (key[i]) common &= key[i];
        any |= key[i];
    }
    common = __reduce_and_sync(~0u, common);
    any = __reduce_or_sync(~0u, any);
    if (lane == 0) tallies[1][warp] = make_uint2(common, any);
    __syncthreads();
#pragma unroll
    for (int w = 0; w < WARPS; ++w) {
        const uint2 of = tallies[1][w];
        common &= of.x;
        any |= of.y;
    }
    const int first = __clz(common ^ any) / 2;
    uint32_t prefix = first == 0 ? 0 : common & ~0u << (32 - 2 * first);
    for (int digit = first; digit < 16; ++digit) {
        const int shift = 30 - 2 * digit;
        const uint32_t one = prefix | 1u << shift, two = prefix | 2u << shift, three = prefix | 3u << shift;
        uint32_t low = 0, high = 0;
#pragma unroll
        for (int i = 0; i < KEYS; ++i) { low += (key[i] >= one) + ((key[i] >= two) << 16); high += key[i] >= three; }
        const uint2 tally = everywhere(low, high);
        const uint32_t t1 = tally.x & 0xFFFF, t2 = tally.x >> 16, t3 = tally.y;
        if (narrow(prefix, one, two, three, t1, t2, t3, topk)) break;
    }
    // prefix is now the key of the last one taken, or less than that of any wanted one.
    uint32_t mine = 0;   // of this warp: larger ones, and from bit 16 on equal ones
#pragma unroll
    for (int i = 0; i < KEYS; ++i) mine += (key[i] > prefix) + ((key[i] == prefix) << 16);
    mine = __reduce_add_sync(~0u, mine);
    if (lane == 0) tallies[turn & 1][warp].x = mine;
    __syncthreads();
    uint32_t before = 0, all = 0;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) {
        const uint32_t of = tallies[turn & 1][w].x;
        before += w < warp ? of : 0;
        all += of;
    }
    const uint32_t need = topk - (all & 0xFFFF), below = (1u << lane) - 1;   // of those equal to it, the first so many
    uint32_t larger = before & 0xFFFF, equal = before >> 16;
#pragma unroll
    for (int i = 0; i < KEYS; ++i) {
        const uint32_t more = __ballot_sync(~0u, key[i] > prefix), same = __ballot_sync(~0u, key[i] == prefix);
        const uint32_t rank = larger + __popc(more & below), ties = equal + __popc(same & below);
        if (more >> lane & 1) to[rank + min(ties, need)] = place(i);
        else if ((same >> lane & 1) && ties < need) to[rank + ties] = place(i);
        larger += __popc(more);
        equal += __popc(same);
    }
}
