// Decode step: a row of logits, cut in slices among a cluster's blocks. A thread reads the same tokens in
// every pass, so a slice needs no barriers. What is wanted from the top (a count, or a weight) is found by
// histograms over ever smaller ranges of places (sample.cuh) until few tokens are left, which every block
// then lists and compares.
#pragma once
#include "cluster.cuh"
#include "sample.cuh"

// Of a row of penalties, as ops/sample/cpu.py has it.
constexpr int MAX_BIAS = 1024, BIAS_IDS = 8, BIASES = BIAS_IDS + MAX_BIAS, HISTORY = BIASES + MAX_BIAS;
constexpr int BUCKETS = 1 << COARSE, LISTED = 256;

struct alignas(16) Bucket {
    uint32_t count, part[3];   // of the sum of weights: 15 bits each, so that the sums of 2^17 tokens fit
};

template <int CLUSTER, int THREADS> struct Memory {
    Bucket buckets[2][BUCKETS];
    uint64_t partial[2][3][CLUSTER * THREADS / 32];
    uint64_t sums[BUCKETS];   // of all blocks: what is wanted, weights or tokens
    uint64_t listed_places[LISTED], listed_weights[LISTED];   // of this block
    uint64_t places[LISTED], weights[LISTED];                 // of all blocks
    uint64_t found;
    uint32_t counts[BUCKETS];
    uint32_t num_listed;
};

// A zero without its sign, as the reference has it.
__device__ __forceinline__ float read(const float* p) { return __ldcg(p) + 0.f; }

__device__ __forceinline__ uint64_t warp_max(uint64_t v) {
    const uint32_t high = __reduce_max_sync(~0u, (uint32_t)(v >> 32));
    const uint32_t low = __reduce_max_sync(~0u, (uint32_t)(v >> 32) == high ? (uint32_t)v : 0u);
    return (uint64_t)high << 32 | low;
}
__device__ __forceinline__ uint64_t warp_sum(uint64_t v) {
    for (int i = 16; i; i >>= 1) v += __shfl_xor_sync(~0u, v, i);
    return v;
}

template <int CLUSTER, int THREADS> struct Row {
    static constexpr int WARPS = THREADS / 32;
    Memory<CLUSTER, THREADS>& s;
    float* values;           // [held]; a thread touches its own only
    const float* logits;     // of this block's slice
    const uint32_t* mask;    // of the row
    int start, mine, held;   // first token of the slice, how many, how many in shared memory
    bool is_masked = false;
    int turn = 0, level = 0;   // which of two places for partial results, for buckets
    const int block = blockIdx.x % CLUSTER, tid = threadIdx.x, warp = threadIdx.x / 32,
              lane = threadIdx.x % 32;

    __device__ __forceinline__ bool is_allowed(int id) const {
        return mask && (__ldcg(mask + id / 32) >> id % 32 & 1);
    }

    // f(logit, id) for this thread's finite logits, allowed ones if the row is masked.
    template <typename F> __device__ __forceinline__ void each(const F& f) const {
#pragma unroll 1
        for (int i = tid; i < mine; i += THREADS) {
            float v = i < held ? values[i] : read(logits + i);
            if (is_masked && i >= held && !is_allowed(start + i)) v = -INFINITY;
            if (v > -INFINITY) f(v, start + i);
        }
    }

    __device__ __forceinline__ void apply_mask() {
        is_masked = true;
#pragma unroll 8
        for (int i = tid; i < min(mine, held); i += THREADS)
            if (!is_allowed(start + i)) values[i] = -INFINITY;
    }

    // Penalises the slice, all of which must fit in shared memory. There lie, in the logits' place, first the
    // counts of the `end` tokens before this one; the last of them is `latest` where it is not yet in the
    // table.
    __device__ void penalise(const int* table, int end, int latest) {
        constexpr int EACH = MAX_BIAS / THREADS;
        const Penalties how = {bits_as<float>(__ldcg(table)), bits_as<float>(__ldcg(table + 1)),
                               bits_as<float>(__ldcg(table + 2))};
        const int num_prompt = __ldcg(table + 3), first = __ldcg(table + 4), num_bias = __ldcg(table + 5);
        uint32_t* seen = (uint32_t*)values;
#pragma unroll 1
        for (int i = tid; i < mine; i += THREADS) seen[i] = 0;
        __syncthreads();
#pragma unroll 1
        for (int64_t i = (int64_t)first + tid; i < end; i += THREADS) {
            const int at = (i == end - 1 && latest >= 0 ? latest : __ldcg(table + HISTORY + i)) - start;
            if (at < 0 || at >= mine) continue;
            if (i < num_prompt) atomicOr(seen + at, IN_PROMPT);
            else atomicAdd(seen + at, 1u);
        }
        __syncthreads();
        int biased[EACH];   // places in the slice
        uint32_t biased_seen[EACH];
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            const int entry = tid + i * THREADS,
                      at = entry < num_bias ? __ldcg(table + BIAS_IDS + entry) - start : -1;
            biased[i] = at < mine ? at : -1;
            biased_seen[i] = biased[i] >= 0 ? seen[at] : 0;
        }
        __syncthreads();
#pragma unroll 4
        for (int i = tid; i < mine; i += THREADS) values[i] = penalised(read(logits + i), 0.f, seen[i], how);
        __syncthreads();
#pragma unroll
        for (int i = 0; i < EACH; ++i)
            if (biased[i] >= 0) {
                const float bias = bits_as<float>(__ldcg(table + BIASES + tid + i * THREADS));
                values[biased[i]] = penalised(read(logits + biased[i]), bias, biased_seen[i], how);
            }
        __syncthreads();
    }

    // The largest or the sum over all threads of the cluster; all learn it. Two places alternate: one is
    // written again only after a barrier that all reach when they have read it.
    template <bool SUM, int N> __device__ __forceinline__ void all(uint64_t (&v)[N]) {
        auto& partial = s.partial[turn & 1];
#pragma unroll
        for (int n = 0; n < N; ++n) {
            v[n] = SUM ? warp_sum(v[n]) : warp_max(v[n]);
            if (lane < CLUSTER) *in_block(&partial[n][block * WARPS + warp], lane) = v[n];
        }
        all_sync();
#pragma unroll
        for (int n = 0; n < N; ++n) {
            uint64_t whole = 0;
            for (int i = lane; i < CLUSTER * WARPS; i += 32) {
                const uint64_t of = partial[n][i];
                whole = SUM ? whole + of : of > whole ? of : whole;
            }
            v[n] = SUM ? warp_sum(whole) : warp_max(whole);
        }
        ++turn;
    }
    __device__ __forceinline__ uint64_t all_max(uint64_t v) {
        uint64_t one[1] = {v};
        all<false>(one);
        return one[0];
    }
    __device__ __forceinline__ uint64_t all_sum(uint64_t v) {
        uint64_t one[1] = {v};
        all<true>(one);
        return one[0];
    }

    // Tokens from `low` to `high`: the last one taken is among them, and `left` of what was wanted is to be
    // had there.
    struct Range {
        uint64_t low, high, left;
        bool is_all;   // there is less than was wanted
    };

    // From the places not below `low`, the last of the best that have `wanted` tokens or, with BY_WEIGHT,
    // wanted(total) weight. A range of at most LISTED tokens that holds it; FROM_TOP: together with all
    // better ones.
    template <bool BY_WEIGHT, bool FROM_TOP, typename Weight, typename Wanted>
    __device__ Range narrow(const Ruler& by, uint64_t low, const Weight& weight, const Wanted& wanted) {
        Range range = {low, ~uint64_t(0), 0, false};
        uint64_t base = 0, taken = 0;
        int shift = COARSE_SHIFT;
        for (bool is_first = true;; is_first = false) {
            if (!is_first) {
                uint64_t ends[2] = {0, 0};   // the highest; the complement of the lowest
                each([&](float v, int id) {
                    const uint64_t place = place_of(by, v, id);
                    if (place < range.low || place > range.high) return;
                    if (place > ends[0]) ends[0] = place;
                    if (~place > ends[1]) ends[1] = ~place;
                });
                all<false>(ends);
                range.low = base = ~ends[1];
                range.high = ends[0];
                // More than LISTED places, all different: the first and the last bucket are used, so every
                // turn narrows.
                const int bits = 64 - leading_zeros(range.high - range.low);
                shift = bits > COARSE ? bits - COARSE : 0;
            }
            // Others may still read the buckets of the turn before, not those of the turn before that.
            Bucket* buckets = s.buckets[level++ & 1];
#pragma unroll 1
            for (int i = tid; i < BUCKETS; i += THREADS) buckets[i] = {0, {0, 0, 0}};
            __syncthreads();
            each([&](float v, int id) {
                const uint64_t place = place_of(by, v, id);
                if (place < range.low || place > range.high) return;
                Bucket& bucket = buckets[(place - base) >> shift];
                atomicAdd(&bucket.count, 1u);
                if constexpr (BY_WEIGHT) {
                    const uint64_t w = weight(v);
#pragma unroll
                    for (int i = 0; i < 3; ++i)
                        if (const uint32_t part = (uint32_t)(w >> 15 * i) & 0x7FFF)
                            atomicAdd(&bucket.part[i], part);
                }
            });
            all_sync();
#pragma unroll 1
            for (int i = tid; i < BUCKETS; i += THREADS) {
                uint64_t sum = 0;
                uint32_t count = 0;
#pragma unroll
                for (int b = 0; b < CLUSTER; ++b) {
                    const Bucket of = *in_block(&buckets[i], b);
                    count += of.count;
                    sum += of.part[0] + ((uint64_t)of.part[1] << 15) + ((uint64_t)of.part[2] << 30);
                }
                s.sums[i] = BY_WEIGHT ? sum : count;
                s.counts[i] = count;
            }
            __syncthreads();
            // Every warp finds the bucket with the last one taken. A lane has EACH buckets in a row.
            constexpr int EACH = BUCKETS / 32;
            uint64_t own = 0;
#pragma unroll
            for (int i = 0; i < EACH; ++i) own += s.sums[lane * EACH + i];
            uint64_t upto = own;   // of the lane's buckets and all higher ones
            for (int i = 1; i < 32; i <<= 1) {
                const uint64_t more = __shfl_down_sync(~0u, upto, i);
                if (lane + i < 32) upto += more;
            }
            const uint64_t total = __shfl_sync(~0u, upto, 0);
            if (is_first) range.left = wanted(total);
            if (total < range.left) return {low, ~uint64_t(0), range.left, true};
            uint64_t above = upto - own;
            const uint32_t holds = __ballot_sync(~0u, above < range.left && upto >= range.left);
            int bucket = lane * EACH + EACH - 1;
#pragma unroll 1
            while (bucket > lane * EACH && above + s.sums[bucket] < range.left) above += s.sums[bucket--];
            const int who = __ffs(holds) - 1;
            bucket = __shfl_sync(~0u, bucket, who);
            above = __shfl_sync(~0u, above, who);
            const uint64_t first = base + ((uint64_t)bucket << shift),
                           last = first + ((uint64_t(1) << shift) - 1);
            if (first > range.low) range.low = first;
            if (last < range.high) range.high = last;
            range.left -= above;
            taken += above;
            if ((FROM_TOP ? taken : 0) + s.counts[bucket] <= LISTED) return range;
        }
    }

    // Lists the tokens from low to high of all blocks, at most LISTED, in no order; how many. Lists are
    // written again only after a barrier that all reach when they have read them: the histogram's.
    template <typename Weight>
    __device__ int list(const Ruler& by, uint64_t low, uint64_t high, const Weight& weight) {
        if (tid == 0) s.num_listed = 0;
        __syncthreads();
        each([&](float v, int id) {
            const uint64_t place = place_of(by, v, id);
            if (place < low || place > high) return;
            const uint32_t at = atomicAdd(&s.num_listed, 1u);
            s.listed_places[at] = place;
            s.listed_weights[at] = weight(v);
        });
        all_sync();
        int count = 0;
#pragma unroll 1
        for (int b = 0; b < CLUSTER; ++b) {
            const int of = (int)*in_block(&s.num_listed, b);
#pragma unroll 1
            for (int i = tid; i < of; i += THREADS) {
                s.places[count + i] = *in_block(&s.listed_places[i], b);
                s.weights[count + i] = *in_block(&s.listed_weights[i], b);
            }
            count += of;
        }
        __syncthreads();
        return count;
    }

    // The place of the last token taken; `low` where there is less than was wanted.
    template <bool BY_WEIGHT, typename Weight, typename Wanted>
    __device__ uint64_t last_taken(const Ruler& by, uint64_t low, const Weight& weight,
                                   const Wanted& wanted) {
        const Range range = narrow<BY_WEIGHT, false>(by, low, weight, wanted);
        if (range.is_all) return low;
        const int count = list(by, range.low, range.high, weight);
#pragma unroll 1
        for (int i = tid; i < count; i += THREADS) {
            uint64_t upto = 0;
            for (int j = 0; j < count; ++j)
                if (s.places[j] >= s.places[i]) upto += s.weights[j];
            if (upto >= range.left && upto - s.weights[i] < range.left) s.found = s.places[i];
        }
        __syncthreads();
        return s.found;
    }
};
