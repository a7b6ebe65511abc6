// Decode step: how a warp of matvec.cu fetches weights, a chunk at a time, some chunks ahead of what it
// multiplies.
#pragma once
#include "matvec.cuh"

// The chunk that a warp fetches next: its unit, that unit's halves left, its brick's chunks left, where it
// lies.
template <int F, typename At> struct Fetcher {
    static constexpr int BRICK = Brick<F>::LOADS * 512, CHUNKS = BRICK / At::CHUNK;
    bool has_next_pass;
    int next_unit, halves_left, chunks_left;
    const char* source;
    // Into stage number `fetched`, which counts the warp's chunks of this launch. `jump`: bricks to the
    // warp's next unit; `back`: from where a pass over the units from `first` to `end` ends to where the next
    // begins.
    template <typename Back>
    __device__ __forceinline__ void next(uint32_t& fetched, uint32_t stage, uint32_t barrier, int stages,
                                         int lane, int halves, int groups, int first, int end, size_t jump,
                                         const Back& back) {
        if (next_unit >= end) return;
        const int at = fetched & (stages - 1);
        if (lane == 0) fetch<At::CHUNK>(stage + at * At::CHUNK, source, barrier + at * 8);
        ++fetched;
        source += At::CHUNK;
        if (--chunks_left == 0) {
            chunks_left = CHUNKS;
            if (--halves_left == 0) {
                halves_left = halves;
                next_unit += groups;
                source += (jump - 1) * BRICK;
                if (At::IS_WIDE && next_unit >= end && has_next_pass) {
                    has_next_pass = false;
                    next_unit = first;
                    source += back() * BRICK;
                }
            }
        }
    }
};
