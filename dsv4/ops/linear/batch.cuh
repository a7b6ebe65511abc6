// Decode step: what a block of matvec.cu multiplies of a batch: a group of rows, at most eight, four (where
// there are few) or two (float32), or those of a task.
#pragma once
#include "turn.cuh"

// Slices of all columns of x, from slice `skipped` of the segment on, by all warps. A warp first asks for all
// its slices, which then become what the tensor core takes in their places. `row_of`: the row of x that a
// column has.
template <int F, typename At, bool IS_F32, typename Rows, typename Read, typename Put>
__device__ __forceinline__ void bring_x(const Segment& s, int skipped, int slices, int count, int warp,
                                        int lane, uint2* x_table, float* undo_table,
                                        typename Item<IS_F32>::Four (&some)[ITEMS / 32], const Rows& row_of,
                                        const Read& read_slice, const Put& put_slice) {
    using X = Strides<F, At, IS_F32>;
    const auto each = [&](auto body) {   // slice and column
        for (int c = 0, i = warp;; i += At::WARPS) {
            for (; i >= slices; ++c) i -= slices;
            if (c >= count) break;
            body(i, c);
        }
    };
    if constexpr (IS_F32) {
        each([&](int i, int c) {
            read_slice(skipped + i, row_of(c), some);
            put_slice(i, c, some);
        });
    } else {
        each([&](int i, int c) {
            copy_x(static_cast<const char*>(s.x) + (size_t)row_of(c) * s.x_stride * 2,
                   (s.first_slice + skipped + i) * SLICE, s.k, s.x_stride % 8 == 0, lane,
                   x_table + i * X::SLICE + c * X::COLUMN);
        });
        await_copies();
        __syncwarp();
        each([&](int i, int c) {
            if constexpr (F != BF16) {
#pragma unroll
                for (int j = 0; j < ITEMS / 32; ++j)
                    some[j] = x_table[i * X::SLICE + c * X::COLUMN + lane + 32 * j];
                put_slice(i, c, some);
            } else if (lane == 0) undo_table[i * COLUMNS + c] = 1.f;
        });
    }
}

// `fetched`: chunks that the warp has fetched in this launch.
template <int F, typename At, bool IS_F32>
__device__ __forceinline__ void multiply_rows(const Params& p, const Segment& s, const int4 work,
                                              char* shared, uint32_t& fetched) {
    constexpr bool WIDE = At::IS_WIDE;
    using X = Strides<F, At, IS_F32>;
    constexpr int LOADS = Brick<F>::LOADS, SCALE = Brick<F>::SCALE, CHUNKS = Fetcher<F, At>::CHUNKS;
    constexpr int PER_GROUP = IS_F32 ? COLUMNS / PARTS : At::HELD;
    constexpr int stages = At::MAX_STAGES;
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    const int groups = At::WARPS * s.per_warp >> 16, group = warp * s.per_warp >> 16,
              within = warp - group * s.warps;
    const int halves = s.halves, end = work.y + work.z;
    const bool idle = group >= groups;
    const int unit = work.y + group;

    // The rows of x to be multiplied, of the batch or of the pairs that a task lists. Groups share them.
    uint2* x_table = reinterpret_cast<uint2*>(shared + At::X_AT);
    float* undo_table = reinterpret_cast<float*>(x_table + s.warps * X::SLICE);   // [slice][column]
    using Some = typename Item<IS_F32>::Four[ITEMS / 32];
    Some some;
    const auto read_slice = [&](int i, int row, Some& some) {   // slice i of the segment
        read_x<IS_F32>(static_cast<const char*>(s.x) + (size_t)row * s.x_stride * (IS_F32 ? 4 : 2),
                       (s.first_slice + i) * SLICE, s.k, lane, some);
    };
    const auto put_slice = [&](int i, int c, const Some& some) {   // to place i of the table, column c
        const float undo = put_x<F != BF16, IS_F32>(
            some, lane, 32, x_table + i * X::SLICE + c * (IS_F32 ? PARTS : 1) * X::COLUMN);
        if (lane == 0) undo_table[i * COLUMNS + c] = undo;
    };
    const uint32_t stage = shared_address(shared) + At::STAGES_AT + warp * stages * At::CHUNK;
    const uint32_t barriers = shared_address(shared) + At::BARRIERS_AT,
                   barrier = barriers + warp * At::MAX_STAGES * 8;
    // Up cannot fetch weights before its tasks are known, so it waits first. Down reads its tasks early: up,
    // which triggers late, has waited for the router.
    if (s.routed == 1) {
        wait_for_prerequisites();
        launch_dependents();
    }
    int expert = 0, place = -1;
    if (s.routed) {
        expert = __ldcg(p.task_expert + work.w);
        if (lane < COLUMNS) place = __ldcg(p.task_pairs + work.w * COLUMNS + lane);
        if (expert < 0) return;
    } else if (lane < PER_GROUP && work.w * PER_GROUP + lane < p.rows) place = work.w * PER_GROUP + lane;
    const int count = __popc(__ballot_sync(~0u, place >= 0));
    // The bricks this warp reads: both halves of a unit lie together, the next unit `jump` bricks on.
    const int64_t place_of_expert = s.places ? __ldcg(s.places + expert) : 0;
    const size_t first =
        (((size_t)(s.places ? 0 : expert) * s.units + unit) * s.slices + s.first_slice + within) * halves;
    const size_t jump = (size_t)groups * s.slices * halves - (halves - 1);
    const uint8_t* scale = s.scale + place_of_expert + first * SCALE;
    const char* const source = reinterpret_cast<const char*>(s.data) + place_of_expert +
                               first * (LOADS * 512);
    Fetcher<F, At> fetcher{WIDE && within + s.warps < s.span, idle ? end : unit, halves, CHUNKS, source};
    const int units = WIDE ? (end - unit + groups - 1) * s.per_group >> 16 : 0;
    // From where a pass over the units ends to where the next begins, in bricks.
    const auto back = [&] { return (int64_t)(s.warps - units * groups * s.slices) * halves; };
    uint32_t taken = fetched;
    const auto fetch_next = [&] {
        fetcher.next(fetched, stage, barrier, stages, lane, halves, groups, work.y + group, end, jump, back);
    };
    // Prefetch the scales before the weights: queued behind the weights of all blocks they would arrive last
    // and stall the first product.
    const bool paired = halves == 2;   // a turn is two bricks: both halves of a unit, or two units
    Scales<F> now[1];
    if (!idle && unit < end) now[0].load(scale, lane);
    for (int i = 0; i < At::MAX_STAGES; ++i) fetch_next();
    // The rest of a first brick of more chunks than stages comes as far as L2.
    if (CHUNKS > stages && lane == 0 && fetcher.next_unit < end)
        prefetch(fetcher.source, (CHUNKS - stages) * At::CHUNK);
    if (s.routed != 1) {
        wait_for_prerequisites();
        if (p.triggers_late) launch_dependents();
    }
    const auto row_of_x = [&](int c) { return __shfl_sync(~0u, place, c) / (s.routed == 1 ? p.choices : 1); };
    const auto bring = [&](int skipped, int slices) {
        bring_x<F, At, IS_F32>(s, skipped, slices, count, warp, lane, x_table, undo_table, some, row_of_x,
                               read_slice, put_slice);
    };
    bring(0, s.warps);
    __syncthreads();
    if (idle && !WIDE) return;      // the others bring x for the next pass too
    const auto take_chunk = [&] {   // where this lane's part of it lies, when it is there
        const int at = taken & (stages - 1);
        await(barrier + at * 8, (taken & stages) != 0);
        ++taken;
        return reinterpret_cast<const uint4*>(shared + At::STAGES_AT + (warp * stages + at) * At::CHUNK) +
               lane;
    };
    const auto between = [&](int skipped, int slices) {
        // All have read the sums of the last turn, and x.
        group_barrier(EVERYONE, At::WARPS * 32);
        bring(skipped, slices);
        group_barrier(EVERYONE, At::WARPS * 32);
    };
    take_turns<F, At, IS_F32>(p, s, warp, lane, g, t, groups, group, within, work.y, end, idle, halves,
                              paired, expert, place, count, shared, x_table, undo_table, now, scale, jump,
                              back, fetch_next, take_chunk, between);
}
