// Decode step: what a block of matvec.cu multiplies of a single row.
#pragma once
#include "turn.cuh"

// Weights that are fetched before the wait. A launch that is paced fetches in three steps, since what the
// small kernels before it read would queue behind a burst: half of the warps' first chunks, the other half's,
// then all second ones.
template <typename At, typename Fetch>
__device__ __forceinline__ void fetch_early(const Params& p, const Segment& s, int warp, int begin, int end,
                                            int groups, int stages, uint32_t barrier, uint32_t barriers,
                                            int next_unit, const Fetch& fetch_next) {
    if (p.paced) {
        __syncthreads();   // all barriers are there
        const int other = warp ^ At::WARPS / 2, its_group = other * s.per_warp >> 16;
        const bool fetches = its_group < groups && begin + its_group<end, follows = warp> other;
        const uint32_t its_barrier = barriers + other * At::MAX_STAGES * 8;
        if (follows && fetches) await(its_barrier, 0);
        if (next_unit < end) {
            fetch_next();
            await(!follows && fetches ? its_barrier : barrier, 0);
#pragma unroll 1
            for (int i = 1; i < stages; ++i) fetch_next();
        }
    } else
#pragma unroll 1
        for (int i = 0; i < p.early_stages; ++i) fetch_next();
}

// A warp's slice of x for the first pass. The chunks that were not fetched early are fetched behind it.
template <bool CAN_ROUND, typename At, typename Read, typename Put, typename Fetch>
__device__ __forceinline__ void bring_row(const Params& p, const Segment& s, int warp, int lane,
                                          bool has_slice, int row, int stages, uint2* x_table,
                                          float* undo_table, char* shared, uint2 (&some)[ITEMS / 32],
                                          const Read& read_slice, const Put& put_slice,
                                          const Fetch& fetch_next) {
    const bool rounds = CAN_ROUND && s.how;
    uint32_t top = 0;   // the largest of a row that is rounded to NVFP4
    if constexpr (CAN_ROUND)
        if (__builtin_expect(rounds, false)) {
            if (has_slice)
                read_block(static_cast<const char*>(s.x) + (size_t)row * s.x_stride * 2,
                           (s.first_slice + warp) * SLICE, s.k, lane, some);
            if (s.x_top) top = __ldcg(s.x_top + row);
        }
    if (has_slice && s.routed != 1 && !rounds) read_slice(warp, row, some);
#pragma unroll 1
    for (int i = p.early_stages; i < stages; ++i) fetch_next();
    if constexpr (CAN_ROUND)
        if (__builtin_expect(rounds, false)) {
            if (s.how == A4 && !s.x_top) {   // all of the row is here
                uint32_t* tops = reinterpret_cast<uint32_t*>(shared);
                top = __reduce_max_sync(~0u, has_slice ? largest(some) : 0);
                if (lane == 0) tops[warp] = top;
                __syncthreads();
                top = __reduce_max_sync(~0u, tops[lane % At::WARPS]);
            }
            if (has_slice) {
                const float undo = put_rounded(some[0], some[1], some[2], some[3], top, s.how,
                                               x_table + warp * MAX_STRIDE);
                if (lane == 0) undo_table[warp * COLUMNS] = undo;
            }
        }
    if (has_slice && !rounds) put_slice(warp, 0, some);
}

// `fetched`: chunks that the warp has fetched in this launch.
template <int F, bool WIDE>
__device__ __forceinline__ void multiply_row(const Params& p, const Segment& s, const int4 work, char* shared,
                                             uint32_t& fetched) {
    using At = Layout<SINGLE_ROW, WIDE>;
    constexpr int LOADS = Brick<F>::LOADS, SCALE = Brick<F>::SCALE, CHUNKS = Fetcher<F, At>::CHUNKS;
    constexpr bool CAN_ROUND = !WIDE && F != BF16;
    const int stages = p.stages;   // a power of two
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    const int groups = At::WARPS * s.per_warp >> 16, group = warp * s.per_warp >> 16,
              within = warp - group * s.warps;
    const int halves = s.halves, end = work.y + work.z;
    const bool idle = group >= groups;
    const int unit = work.y + group;

    uint2* x_table = reinterpret_cast<uint2*>(shared + At::X_AT);
    float* undo_table = reinterpret_cast<float*>(x_table +
                                                 (WIDE ? s.span : s.warps) * MAX_STRIDE);   // [slice][column]
    using Some = typename Item<false>::Four[ITEMS / 32];
    Some some;
    const auto read_slice = [&](int i, int row, Some& some) {   // slice i of the segment
        read_x<false>(static_cast<const char*>(s.x) + (size_t)row * s.x_stride * 2,
                      (s.first_slice + i) * SLICE, s.k, lane, some);
    };
    const auto put_slice = [&](int i, int c, const Some& some) {   // to place i of the table, column c
        const float undo = put_x<F != BF16, false>(some, lane, 32, x_table + i * MAX_STRIDE);
        if (lane == 0) undo_table[i * COLUMNS + c] = undo;
    };
    const bool has_slice = warp < s.warps;   // a warp brings one slice of x, of every pass
    const uint32_t stage = shared_address(shared) + At::STAGES_AT + warp * stages * At::CHUNK;
    const uint32_t barriers = shared_address(shared) + At::BARRIERS_AT,
                   barrier = barriers + warp * At::MAX_STAGES * 8;
    open_barriers<At::MAX_STAGES>(barrier, lane);
    // Up cannot fetch weights before its tasks are known, so it waits first; its input is older and is read
    // early. Down reads its tasks early: up, which triggers late, has waited for the router.
    if (s.routed == 1) {
        if (has_slice) read_slice(warp, 0, some);
        wait_for_prerequisites();
        launch_dependents();
    }
    int expert = 0, place = -1;
    if (s.routed) {
        expert = __ldcg(p.task_expert + work.w);
        place = lane ? -1 : work.w;
        if (expert < 0) return;
    } else if (lane < COLUMNS && work.w * COLUMNS + lane < p.rows) place = work.w * COLUMNS + lane;
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
    const size_t second = (paired ? 1 : jump) * SCALE;   // from the first brick's to the second's
    const auto has_second = [&](int at) { return paired ? at < end : at + groups < end; };
    Scales<F> now[AT_ONCE<F, At>];
    if (!idle && unit < end) now[0].load(scale, lane);
    if constexpr (AT_ONCE<F, At> == 2)
        if (!idle && has_second(unit)) now[1].load(scale + second, lane);
    fetch_early<At>(p, s, warp, work.y, end, groups, stages, barrier, barriers, fetcher.next_unit,
                    fetch_next);
    // The rest of a first brick of more chunks than stages comes as far as L2.
    if (CHUNKS > stages && p.early_stages == stages && lane == 0 && fetcher.next_unit < end)
        prefetch(fetcher.source, (CHUNKS - stages) * At::CHUNK);
    if constexpr (CAN_ROUND)   // of zeros, so that its instructions are here when x is
        if (s.how && has_slice) put_rounded({}, {}, {}, {}, USUAL_TOP, s.how, x_table + warp * MAX_STRIDE);
    if (s.routed != 1) {
        wait_for_prerequisites();
        if (p.triggers_late) launch_dependents();
    }
    if (blockIdx.x == gridDim.x - 1 && threadIdx.x < p.clears) p.cleared[threadIdx.x] = 0;
    bring_row<CAN_ROUND, At>(p, s, warp, lane, has_slice, s.routed ? work.w : 0, stages, x_table, undo_table,
                             shared, some, read_slice, put_slice, fetch_next);
    if constexpr (WIDE)
        for (int i = warp + s.warps; has_slice && i < s.span; i += s.warps) {
            read_slice(i, s.routed == 2 ? work.w : 0, some);
            put_slice(i, 0, some);
        }
    __syncthreads();
    if (idle) return;
    const auto take_chunk = [&] {   // where this lane's part of it lies, when it is there
        const int at = taken & (stages - 1);
        await(barrier + at * 8, (taken & stages) != 0);
        ++taken;
        return reinterpret_cast<const uint4*>(shared + At::STAGES_AT + (warp * stages + at) * At::CHUNK) +
               lane;
    };
    const auto between = [&](int, int) {
        group_barrier(group, s.warps * 32);
    };   // all have read the sums of the last turn
    take_turns<F, At, false>(p, s, warp, lane, g, t, groups, group, within, work.y, end, idle, halves, paired,
                             expert, place, count, shared, x_table, undo_table, now, scale, jump, back,
                             fetch_next, take_chunk, between);
}
