// Which experts a row goes to. For choose.cu, which makes tasks of several rows, and matvec.cu, where a single row has none.
#pragma once
#include <stdint.h>

#include "launch.cuh"

// Larger floats have larger keys; both zeros have one.
__device__ __forceinline__ uint32_t order(float v) {
    const uint32_t bits = __float_as_uint(v == 0.f ? 0.f : v);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// The index of the warp's largest key, the lower one on a tie; every lane learns it.
__device__ __forceinline__ int best_of_warp(uint32_t key, int index) {
    const uint32_t best = __reduce_max_sync(~0u, key);
    return (int)__reduce_min_sync(~0u, key == best ? (uint32_t)index : 0xFFFFFFFFu);
}

struct Chosen { int expert; float weight; };

// sqrt(softplus(logit)) weights the experts; the largest with bias, or a table by token id, names them. A warp takes a row.
struct Router {
    static constexpr int MANY = 16;   // experts a lane, at most
    const int64_t* table;
    int experts, choices;
    float scale, bias[MANY];

    // Reads weights only.
    __device__ __forceinline__ Router(const float* with, const int64_t* table, int experts, int choices, float scale, int lane)
        : table(table), experts(experts), choices(choices), scale(scale) {
#pragma unroll
        for (int i = 0; i < MANY; ++i) bias[i] = with && lane + 32 * i < experts ? __ldg(with + lane + 32 * i) : 0.f;
    }

    // -> in lane i below `choices` the i-th expert by rising number, and its weight.
    __device__ __forceinline__ Chosen choose(const float* logits, const int64_t* id, int lane) const {
        float score[MANY];
        uint32_t key[MANY];   // 0 is below every number's: taken, or no expert
#pragma unroll
        for (int i = 0; i < MANY; ++i) score[i] = lane + 32 * i < experts ? __ldcg(logits + lane + 32 * i) : 0.f;
        const int listed = table && lane < choices ? (int)table[max(__ldcg((const long long*)id), 0ll) * choices + lane] : 0;
#pragma unroll
        for (int i = 0; i < MANY; ++i) {
            key[i] = 0;
            if (32 * i >= experts) continue;
            score[i] = sqrtf(fmaxf(score[i], 0.f) + log1pf(expf(-fabsf(score[i]))));
            if (lane + 32 * i < experts) key[i] = order(score[i] + bias[i]);
        }
        Chosen mine = {0x7FFFFFFF, 0.f};   // in lane c the c-th choice
        float total = 0.f;
        for (int c = 0; c < choices; ++c) {
            int index;
            if (table) index = __shfl_sync(~0u, listed, c);
            else {
                uint32_t best = key[0];
                int at = lane;
#pragma unroll
                for (int i = 1; i < MANY; ++i)
                    if (key[i] > best) { best = key[i]; at = lane + 32 * i; }
                index = best_of_warp(best, at);
            }
            float s = 0.f;
#pragma unroll
            for (int i = 0; i < MANY; ++i)
                if (lane + 32 * i == index) { s = score[i]; key[i] = 0; }
            s = __shfl_sync(~0u, s, index & 31);
            total += s;
            if (lane == c) mine = {index, s};
        }
        mine.weight = mine.weight / total * scale;
        int place = 0;   // equal ones keep their order
        for (int c = 0; c < choices; ++c) {
            const int other = __shfl_sync(~0u, mine.expert, c);
            place += other < mine.expert || (other == mine.expert && c < lane);
        }
        Chosen sorted = {0, 0.f};
        for (int c = 0; c < choices; ++c) {
            const int to = __shfl_sync(~0u, place, c), expert = __shfl_sync(~0u, mine.expert, c);
            const float weight = __shfl_sync(~0u, mine.weight, c);
            if (lane == to) sorted = {expert, weight};
        }
        return sorted;
    }
};
