// Decode step: y = x Wt for one to eight rows of x at a time, W in 4, 8 or 16 bits. Reads each weight once, at memory speed.
//
// A weight is cut in tiles of 16 rows and slices of 512 columns; one warp takes one slice of a tile, and eight
// columns of x (the rows of a batch) ride along in the tensor core's n. What a tile holds lies in the order in
// which the lanes of mma.m16n8k16 want it (tiles.py packs it), 16 bytes per lane and load. The sum over K has one
// order whatever the batch: blocks of columns inside the tensor core along the slice, then the slices one after the
// other. A column of the tensor core never sees its neighbours, so a row's result does not
// depend on them.
//
// Eight slices are summed at a time. Of more (WIDE) a block makes two passes over its units, each over half of K: x of all
// columns would not fit in shared memory. The sums of the first pass are the second's first summand, and the thread that
// needs them has written them itself.
#include "block.cuh"
#include "mix.cuh"
#include "share.cuh"

enum { AS_ACT = 0, AS_F32 = 1 };   // what y holds; pairs always give SwiGLU in the activations' type
constexpr int MAX_SEGMENTS = 16, MAX_SHARES = 2;

struct Params {
    Segment segments[MAX_SEGMENTS];
    const int4* work;         // segment, first unit, units, task (routed) or group of eight rows; where there are shares: -, block, blocks, -
    Share shares[MAX_SHARES];
    int num_shares;
    int max_tasks;            // with shares
    const int* task_expert;   // [tasks], -1 beyond the last
    const int* task_pairs;    // [tasks][8], -1 beyond the last
    const float* weights;     // [pairs] routing weights
    int choices;              // experts per token
    int rows;                 // of the batch
    float limit;              // of the clamped SwiGLU
    int triggers_late;        // launch_dependents comes after the wait
    int stages;               // of a single row's warp, 2 or 4
    int early_stages, paced;  // a single row: chunks that a warp fetches before the wait; not all warps at once
    Mixing mixing;            // beside the products, where a block's work says segment -1
    uint32_t* cleared;        // largest magnitudes of rows that later launches write, zero from here on; a single row's launch
    int clears;               // so many
    const char* prefetch;     // what the next kernel reads first, prefetched to L2; may be null
    int64_t prefetch_bytes;
};

// `fetched`: chunks that the warp has fetched in this launch.
template <int F, bool SINGLE, bool IS_F32, bool WIDE>
__device__ __forceinline__ void run(const Params& p, const Segment& s, const int4 work, char* shared, uint32_t& fetched) {
    constexpr int LOADS = Brick<F>::LOADS, SCALE = Brick<F>::SCALE;
    using At = Layout<SINGLE, WIDE>;
    constexpr bool CAN_ROUND = SINGLE && !WIDE && F != BF16;
    constexpr int WARPS = At::WARPS, CHUNK = At::CHUNK, CHUNK_LOADS = CHUNK / 512, CHUNKS = LOADS / CHUNK_LOADS;
    // A brick's sum is one chain of products, each waiting for the one before: of a single row two bricks at a time keep the tensor
    // core busy. Of a batch twice as many warps do, and a brick's stage is fetched anew while the other is multiplied.
    constexpr bool PAIRS = SINGLE && F == NVFP4 && !WIDE;
    static_assert(!PAIRS || CHUNKS == 1);
    constexpr int PER_GROUP = IS_F32 ? COLUMNS / PARTS : COLUMNS;
    const int stages = At::SINGLE ? p.stages : At::MAX_STAGES;   // a power of two
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    const int groups = WARPS * s.per_warp >> 16, group = warp * s.per_warp >> 16, within = warp - group * s.warps;
    const int halves = s.halves, end = work.y + work.z;
    const bool idle = group >= groups;
    int unit = work.y + group;

    // The rows of x to be multiplied, of the batch or of the pairs that a task lists. Groups share them.
    constexpr int X_STRIDE = IS_F32 ? MAX_STRIDE : STRIDE<F>;
    const int stride = At::SINGLE ? 0 : X_STRIDE, slice_stride = stride ? COLUMNS * MAX_STRIDE : MAX_STRIDE;
    uint2* x_table = reinterpret_cast<uint2*>(shared + At::X_AT);
    float* undo_table = reinterpret_cast<float*>(x_table + (At::SINGLE && WIDE ? s.span : s.warps) * slice_stride);   // [slice][column]
    using Some = typename Item<IS_F32>::Four[ITEMS / 32];
    Some some;
    const auto read_slice = [&](int i, int row, Some& some) {   // slice i of the segment
        read_x<IS_F32>(static_cast<const char*>(s.x) + (size_t)row * s.x_stride * (IS_F32 ? 4 : 2), (s.first_slice + i) * SLICE, s.k, lane, some);
    };
    const auto put_slice = [&](int i, int c, const Some& some) {   // to place i of the table, column c
        const float undo = put_x<F != BF16, IS_F32>(some, lane, 32, x_table + i * slice_stride + c * (IS_F32 ? PARTS : 1) * stride);
        if (lane == 0) undo_table[i * COLUMNS + c] = undo;
    };
    const bool has_slice = At::SINGLE && warp < s.warps;   // of a single row's x a warp brings one slice, of every pass
    const uint32_t stage = shared_address(shared) + At::STAGES_AT + warp * stages * CHUNK;
    const uint32_t barriers = shared_address(shared) + At::BARRIERS_AT, barrier = barriers + warp * At::MAX_STAGES * 8;
    if constexpr (At::SINGLE) open_barriers<At::MAX_STAGES>(barrier, lane);
    // Up cannot fetch weights before its tasks are known, so it waits first; a single row's input is older and is read
    // early. Down reads its tasks early: up, which triggers late, has waited for the router.
    if (s.routed == 1) {
        if (has_slice) read_slice(warp, 0, some);
        wait_for_prerequisites();
        launch_dependents();
    }
    // A task: its expert, and in lane i the row of y that column i belongs to, -1 beyond the last.
    int expert = 0, place = -1;
    if (s.routed) {
        expert = __ldcg(p.task_expert + work.w);
        if (At::SINGLE) place = lane ? -1 : work.w;
        else if (lane < COLUMNS) place = __ldcg(p.task_pairs + work.w * COLUMNS + lane);
        if (expert < 0) return;
    } else if (lane < PER_GROUP && work.w * PER_GROUP + lane < p.rows) place = work.w * PER_GROUP + lane;
    const int count = __popc(__ballot_sync(~0u, place >= 0));
    // The bricks this warp reads: both halves of a unit lie together, the next unit `jump` bricks on.
    const int64_t place_of_expert = s.places ? __ldcg(s.places + expert) : 0;
    const size_t first = (((size_t)(s.places ? 0 : expert) * s.units + unit) * s.slices + s.first_slice + within) * halves;
    const size_t jump = (size_t)groups * s.slices * halves - (halves - 1);
    const uint8_t* scale = s.scale + place_of_expert + first * SCALE;
    const char* source = reinterpret_cast<const char*>(s.data) + place_of_expert + first * (LOADS * 512);
    // The next chunk to fetch: its unit, that unit's halves left, and its brick's chunks left.
    int chunks_left = CHUNKS, halves_left = halves, next_unit = idle ? end : unit;
    bool has_next_pass = WIDE && within + s.warps < s.span;
    const int units = WIDE ? (end - unit + groups - 1) * s.per_group >> 16 : 0;
    // From where a pass over the units ends to where the next begins, in bricks.
    const auto back = [&] { return (int64_t)(s.warps - units * groups * s.slices) * halves; };
    uint32_t taken = fetched;
    const auto fetch_next = [&] {
        if (next_unit >= end) return;
        const int at = fetched & (stages - 1);
        if (lane == 0) fetch<CHUNK>(stage + at * CHUNK, source, barrier + at * 8);
        ++fetched;
        source += CHUNK;
        if (--chunks_left == 0) {
            chunks_left = CHUNKS;
            if (--halves_left == 0) {
                halves_left = halves;
                next_unit += groups;
                source += (jump - 1) * (LOADS * 512);
                if (WIDE && next_unit >= end && has_next_pass) {
                    has_next_pass = false;
                    next_unit = work.y + group;
                    source += back() * (LOADS * 512);
                }
            }
        }
    };
    // Scales are asked for first: behind the weights of all blocks they would come last, and nothing could be multiplied till then.
    // Of the bricks of a turn, from `scale` on: the second `second` bytes, the next turn's first `turn_bytes` further.
    const bool paired = halves == 2;   // a turn is two bricks: both halves of a unit, or two units
    const size_t second = (paired ? 1 : jump) * SCALE, turn_bytes = second + jump * SCALE;
    const auto has_second = [&](int at) { return paired ? at < end : at + groups < end; };
    Scales<F> now[PAIRS ? 2 : 1];
    if (!idle && unit < end) now[0].load(scale, lane);
    if constexpr (PAIRS)
        if (!idle && has_second(unit)) now[1].load(scale + second, lane);
    // Weights are fetched before the wait. A single row's launch that is paced does so in three steps, since whatever the
    // small kernels before it read would queue behind a burst: half of the warps' first chunks, the other half's, then all
    // second ones.
    if constexpr (At::SINGLE) {
        if (p.paced) {
            __syncthreads();   // all barriers are there
            const int other = warp ^ WARPS / 2, its_group = other * s.per_warp >> 16;
            const bool fetches = its_group < groups && work.y + its_group < end, follows = warp > other;
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
    } else for (int i = 0; i < At::MAX_STAGES; ++i) fetch_next();
    // The rest of a first brick of more chunks than stages comes as far as L2.
    if (CHUNKS > stages && (!At::SINGLE || p.early_stages == stages) && lane == 0 && next_unit < end)
        prefetch(source, (CHUNKS - stages) * CHUNK);
    if constexpr (CAN_ROUND)   // of zeros, so that its instructions are here when x is
        if (s.how && has_slice) put_rounded({}, {}, {}, {}, USUAL_TOP, s.how, x_table + warp * slice_stride);
    if (s.routed != 1) {
        wait_for_prerequisites();
        if (p.triggers_late) launch_dependents();
    }
    if constexpr (At::SINGLE)
        if (blockIdx.x == gridDim.x - 1 && threadIdx.x < p.clears) p.cleared[threadIdx.x] = 0;
    // All columns, by all warps. A warp first asks for all its slices, which then become what the tensor core takes in their places.
    const auto bring_x = [&](int skipped, int slices) {
        const auto each = [&](auto body) {   // slice and column
            for (int c = 0, i = warp;; i += WARPS) {
                for (; i >= slices; ++c) i -= slices;
                if (c >= count) break;
                body(i, c);
            }
        };
        const auto row_of_x = [&](int c) { return __shfl_sync(~0u, place, c) / (s.routed == 1 ? p.choices : 1); };
        if constexpr (IS_F32) {
            each([&](int i, int c) {
                read_slice(skipped + i, row_of_x(c), some);
                put_slice(i, c, some);
            });
        } else {
            each([&](int i, int c) {
                copy_x(static_cast<const char*>(s.x) + (size_t)row_of_x(c) * s.x_stride * 2, (s.first_slice + skipped + i) * SLICE, s.k,
                       s.x_stride % 8 == 0, lane, x_table + i * slice_stride + c * stride);
            });
            await_copies();
            __syncwarp();
            each([&](int i, int c) {
                if constexpr (F != BF16)
#pragma unroll
                    for (int j = 0; j < ITEMS / 32; ++j) some[j] = x_table[i * slice_stride + c * stride + lane + 32 * j];
                if constexpr (F != BF16) put_slice(i, c, some);
                else if (lane == 0) undo_table[i * COLUMNS + c] = 1.f;
            });
        }
    };
    if constexpr (At::SINGLE) {
        const int row = s.routed ? work.w : 0;
        const bool rounds = CAN_ROUND && s.how;
        uint32_t top = 0;   // the largest of a row that is rounded to NVFP4
        if constexpr (CAN_ROUND)
            if (__builtin_expect(rounds, false)) {
                if (has_slice) read_block(static_cast<const char*>(s.x) + (size_t)row * s.x_stride * 2, (s.first_slice + warp) * SLICE, s.k, lane, some);
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
                    top = __reduce_max_sync(~0u, tops[lane % WARPS]);
                }
                if (has_slice) {
                    const float undo = put_rounded(some[0], some[1], some[2], some[3], top, s.how, x_table + warp * slice_stride);
                    if (lane == 0) undo_table[warp * COLUMNS] = undo;
                }
            }
        if (has_slice && !rounds) put_slice(warp, 0, some);
        if constexpr (WIDE)
            for (int i = warp + s.warps; has_slice && i < s.span; i += s.warps) {
                read_slice(i, s.routed == 2 ? work.w : 0, some);
                put_slice(i, 0, some);
            }
    } else bring_x(0, s.warps);
    __syncthreads();
    if (idle && (At::SINGLE || !WIDE)) return;   // the others bring x for the next pass too

    // What the sums of a turn need: column i's routing weight in lane i, half a warp's factor.
    const float routing = s.routed == 1 && place >= 0 ? __ldcg(p.weights + place) : 1.f;
    const float factor = __ldg(s.factor + expert * halves + (halves == 2 ? lane >> 4 : 0)) * (F <= MXFP4 ? E2M1_UNIT : 1.f);
    const auto row_of = [&](int at) {
        return !At::SINGLE && s.routed == 2 ? (size_t)(at / p.choices) * (p.choices + 1) + at % p.choices : (size_t)at;
    };
    const auto carry_of = [&](int at, const Lane& to) {   // between two passes; in y, if it holds float32 sums
        return s.carry ? s.carry + ((size_t)at * halves + (paired ? to.h : 0)) * s.n + to.n
                       : static_cast<float*>(s.y) + row_of(at) * s.y_stride + to.n;
    };
#pragma unroll 1
    for (int pass = 0; pass < (WIDE ? MAX_PASSES : 1); ++pass) {
        const int skipped = WIDE ? pass * s.warps : 0;
        if (WIDE && skipped >= s.span) break;
        const int slices = WIDE ? min(s.warps, s.span - skipped) : s.warps;
        if constexpr (WIDE)
            if (pass) {
                // All have read the sums of the last turn, and x.
                if constexpr (At::SINGLE) group_barrier(group, s.warps * 32);
                else {
                    group_barrier(EVERYONE, WARPS * 32);
                    bring_x(skipped, slices);
                    group_barrier(EVERYONE, WARPS * 32);
                }
                unit = work.y + group;
            }
        const bool multiplies = !WIDE || (!idle && within < slices);
        const int x_place = within + (At::SINGLE ? skipped : 0);
        const uint2* my_x = x_table + x_place * slice_stride + g * stride + (F == NVFP4 ? 4 * t : t);
        constexpr int SHARE = IS_F32 ? PARTS : 1;
        const float undo0 = multiplies ? undo_table[x_place * COLUMNS + 2 * t / SHARE] : 1.f;
        const float undo1 = multiplies ? undo_table[x_place * COLUMNS + (2 * t + 1) / SHARE] : 1.f;
        for (int turn = 0; unit < end && !(WIDE && idle); unit += paired ? groups : 2 * groups, ++turn) {
            const int column = within + turn - ((within + turn) * s.per_warp >> 16) * s.warps;   // this warp's to sum, another one each turn
            constexpr int MAX_CARRIED = At::SINGLE ? 1 : 2;   // columns of a warp, if there are several passes
            float carried[MAX_CARRIED] = {};
            if constexpr (WIDE)
#pragma unroll
                for (int i = 0; i < MAX_CARRIED; ++i) {
                    if (pass == 0) break;
                    const int c = column + i * s.warps, at = __shfl_sync(~0u, place, c);
                    const Lane to(lane, unit, groups, paired);
                    if (c < count && to.tile < end && to.n < s.n) carried[i] = *carry_of(at, to);
                }
            float* table = reinterpret_cast<float*>(shared) + (turn & 1) * At::TABLE;
            const auto put_sum = [&](int sub, const float (&sum)[4]) {
                float* out = table + (warp * 2 + sub) * At::SUMS + g;   // [column][row]
                if (!At::SINGLE || t == 0) {
                    out[(2 * t) * 16] = sum[0] * undo0;
                    out[(2 * t) * 16 + 8] = sum[2] * undo0;
                }
                if (!At::SINGLE) {
                    out[(2 * t + 1) * 16] = sum[1] * undo1;
                    out[(2 * t + 1) * 16 + 8] = sum[3] * undo1;
                }
            };
            const auto next_chunk = [&] {   // where it lies
                const int at = taken & (stages - 1);
                await(barrier + at * 8, (taken & stages) != 0);
                ++taken;
                return reinterpret_cast<const uint4*>(shared + At::STAGES_AT + (warp * stages + at) * CHUNK) + lane;
            };
            if constexpr (PAIRS) {
                const int after = unit + (paired ? groups : 2 * groups);
                scale += turn_bytes;
                Scales<F> next[2] = {now[0], now[1]};
                if (after < end) next[0].load(scale, lane);
                if (has_second(after)) next[1].load(scale + second, lane);
                const uint4* first = next_chunk();
                if (has_second(unit)) {
                    const uint4* other = next_chunk();
                    float sums[2][4] = {};
#pragma unroll 2   // a single row's launch fetches its instructions anew, so loops are loops
                    for (int i = 0; i < CHUNK_LOADS; i += 2) {   // a word of scales
                        multiply_nvfp4<2>({first[i * 32], other[i * 32]}, 0, my_x + i * 16, now, sums);
                        multiply_nvfp4<2>({first[i * 32 + 32], other[i * 32 + 32]}, 1, my_x + i * 16, now, sums);
                        now[0].rotate();
                        now[1].rotate();
                    }
                    __syncwarp();
                    fetch_next();
                    fetch_next();
                    put_sum(0, sums[0]);
                    put_sum(1, sums[1]);
                } else {
                    float sums[1][4] = {};
#pragma unroll 2   // a single row's launch fetches its instructions anew, so loops are loops
                    for (int i = 0; i < CHUNK_LOADS; i += 2) {
                        multiply_nvfp4<1>({first[i * 32]}, 0, my_x + i * 16, {now[0]}, sums);
                        multiply_nvfp4<1>({first[i * 32 + 32]}, 1, my_x + i * 16, {now[0]}, sums);
                        now[0].rotate();
                    }
                    __syncwarp();
                    fetch_next();
                    put_sum(0, sums[0]);
                }
                now[0] = next[0];
                now[1] = next[1];
            } else for (int sub = 0; multiplies && sub < 2 && (paired || unit + sub * groups < end); ++sub) {
                scale += (paired && sub == 0 ? 1 : jump) * SCALE;
                bool more = paired ? sub == 0 || unit + groups < end : unit + (sub + 1) * groups < end;
                if constexpr (WIDE)
                    if (!more && within + skipped + s.warps < s.span) {
                        scale += back() * SCALE;
                        more = true;
                    }
                float sums[1][4] = {}, block[4] = {};
                Scales<F> next = now[0];
                if (more) next.load(scale, lane);
                constexpr bool ROLLS = At::SINGLE && F >= FP8;
#pragma unroll (ROLLS ? 1 : CHUNKS)
                for (int chunk = 0; chunk < CHUNKS; ++chunk) {
                    const uint4* w = next_chunk();
                    const uint2* its_x = my_x + (ROLLS ? chunk * (ITEMS / CHUNKS) : 0);
#pragma unroll
                    for (int i = 0; i < CHUNK_LOADS; ++i) {
                        const int load = ROLLS ? i : chunk * CHUNK_LOADS + i;
                        if constexpr (F == NVFP4) multiply_nvfp4<1>({w[i * 32]}, load, its_x, now, sums);
                        else multiply<F>(w[i * 32], load, its_x, now[0], lane, sums[0], block);
                    }
                    if constexpr (ROLLS && F == FP8)   // two words of scales are used up
                        for (int i = 0; i < CHUNK_LOADS / 4; ++i) now[0].rotate();
                    __syncwarp();
                    fetch_next();
                }
                now[0] = next;
                put_sum(sub, sums[0]);
            }
            if (!At::SINGLE && s.warps == 1) __syncwarp();
            else group_barrier(group, s.warps * 32);
            // One warp per column; the others go on.
            const Lane to(lane, unit, groups, paired);
            const bool inside = to.tile < end && to.n < s.n;
            for (int c = column; c < count; c += s.warps) {
                float total = 0.f;
                if constexpr (WIDE) { total = carried[0]; carried[0] = carried[MAX_CARRIED - 1]; }
                const float* in = table + (group * s.warps * 2 + to.h) * At::SUMS + to.r;
#pragma unroll
                for (int w = 0; w < MAX_SLICES; ++w)
                    if (w < slices) {
                        float whole = 0.f;
                        if constexpr (IS_F32)
                            for (int q = (F == BF16 ? 2 : 1); q >= 0; --q) whole += in[w * 2 * At::SUMS + (c * PARTS + q) * 16];
                        else whole = in[w * 2 * At::SUMS + c * 16];
                        total += whole;
                    }
                const int at = __shfl_sync(~0u, place, c);
                if (WIDE && skipped + s.warps < s.span) {
                    if (inside) *carry_of(at, to) = total;
                    continue;
                }
                const float v = total * factor;
                const size_t y_at = row_of(at) * s.y_stride + to.n;
                if (paired) {
                    const float weight = __shfl_sync(~0u, routing, c);
                    const float gate = at_most(as_act<IS_F32>(v), p.limit);
                    const float up = at_least(at_most(as_act<IS_F32>(__shfl_down_sync(~0u, v, 16)), p.limit), -p.limit);
                    float hidden = gate / (1.f + expf(-gate)) * up;
                    if (s.routed) hidden *= weight;
                    if (to.h == 0 && inside) put_act<IS_F32>(s.y, y_at, hidden);
                } else if (inside) {
                    if (s.epilogue == AS_F32) static_cast<float*>(s.y)[y_at] = v;
                    else put_act<IS_F32>(s.y, y_at, v);
                }
                if (At::SINGLE && s.y_top) {
                    const uint32_t top = __reduce_max_sync(~0u, inside ? largest<1>({pack_bf16(v, 0.f)}) : 0);
                    if (lane == 0) atomicMax(s.y_top + at, top);
                }
            }
        }
    }
}

template <bool SINGLE, bool IS_F32, bool WIDE>
__global__ void __launch_bounds__(Layout<SINGLE, WIDE>::WARPS * 32, Layout<SINGLE, WIDE>::BLOCKS) matvec_kernel(const __grid_constant__ Params p) {
    extern __shared__ __align__(128) char shared[];
    int4 work = __ldg(p.work + blockIdx.x);
    if (!p.triggers_late) launch_dependents();
    if (work.x < 0) {
        wait_for_prerequisites();
        if (p.triggers_late) launch_dependents();
        mix(p.mixing, p.rows);
        return;
    }
    for (int64_t at = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) * 128; at < p.prefetch_bytes; at += (int64_t)gridDim.x * blockDim.x * 128)
        prefetch_line(p.prefetch + at);
    const bool is_shared = !SINGLE && p.num_shares;
    int tasks = 0;
    Part part;
    if (is_shared) {
        if (p.segments[0].routed == 1) {
            wait_for_prerequisites();
            launch_dependents();
        }
        for (int first = 0; first < p.max_tasks; first += blockDim.x) {
            const int i = first + threadIdx.x;
            tasks += __syncthreads_count(i < p.max_tasks && __ldcg(p.task_expert + i) >= 0);
        }
        part = Part(p.shares, p.num_shares, tasks, work.y, work.z);
        work = part.next(p.shares, p.num_shares, tasks);
        if (work.x < 0) wait_for_prerequisites();   // if no block had a share, the launch would be complete too early
    }
    using At = Layout<SINGLE, WIDE>;
    if constexpr (!SINGLE)
        open_barriers<At::MAX_STAGES>(shared_address(shared) + At::BARRIERS_AT + (threadIdx.x >> 5) * At::MAX_STAGES * 8, threadIdx.x & 31);
    uint32_t fetched = 0;
    while (work.x >= 0) {
        const Segment& s = p.segments[work.x];
        if (is_shared) work.z = min(work.z, s.units - work.y);
        switch (s.format) {
            case NVFP4: run<NVFP4, SINGLE, IS_F32, WIDE>(p, s, work, shared, fetched); break;
            case MXFP4: run<MXFP4, SINGLE, IS_F32, WIDE>(p, s, work, shared, fetched); break;
            case FP8: run<FP8, SINGLE, IS_F32, WIDE>(p, s, work, shared, fetched); break;
            case BF16: run<BF16, SINGLE, IS_F32, WIDE>(p, s, work, shared, fetched); break;
        }
        if (!is_shared) break;
        group_barrier(EVERYONE, At::WARPS * 32);   // x and sums are read
        work = part.next(p.shares, p.num_shares, tasks);
    }
}

// What decode.py launches, with this much shared memory.
template <typename At> constexpr bool takes(int warps, int bytes) { return At::WARPS == warps && At::STAGES_AT == bytes && bytes % 128 == 0; }
static_assert(takes<Layout<false, false>>(IS_SMALL ? 8 : 16, IS_SMALL ? 84352 : 100864) && Layout<false, true>::STAGES_AT == Layout<false, false>::STAGES_AT);
static_assert(takes<Layout<true, false>>(8, 11008) && takes<Layout<true, true>>(8, 19712));
template __global__ void matvec_kernel<false, true, false>(const __grid_constant__ Params);
template __global__ void matvec_kernel<false, true, true>(const __grid_constant__ Params);
template __global__ void matvec_kernel<false, false, false>(const __grid_constant__ Params);
template __global__ void matvec_kernel<false, false, true>(const __grid_constant__ Params);
template __global__ void matvec_kernel<true, false, false>(const __grid_constant__ Params);
template __global__ void matvec_kernel<true, false, true>(const __grid_constant__ Params);
