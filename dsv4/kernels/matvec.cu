// y = x Wt for one to eight rows of x at a time, W in 4, 8 or 16 bits: reads each weight once, at memory speed.
//
// A weight is cut in tiles of 16 rows and slices of 512 columns; one warp takes one slice of a tile, and eight
// columns of x (the rows of a batch) ride along in the tensor core's n. What a tile holds lies in the order in
// which the lanes of mma.m16n8k16 want it (tiles.py packs it), 16 bytes per lane and load. The sum over K has one
// order whatever the batch: blocks of columns inside the tensor core along the slice, then the slices one after the
// other. A column of the tensor core never sees its neighbours, so a row's result does not depend on them.
//
// NVFP4 has a scale for every 16 columns, too many to put on the weights. So its blocks ride in columns of the tensor core,
// too: of the 16 columns of W that one product takes, four lie in each of four blocks; x stands in four columns, in each
// only with the block that it belongs to and zero elsewhere. What comes out are the sums of the four blocks, apart; each
// is multiplied with its scale once. Two vectors fill the eight columns, or a single one with two loads after each other.
#include "inputs.cuh"
#include "route.cuh"

enum { AS_ACT = 0, AS_F32 = 1 };   // what y holds; pairs always give SwiGLU in the activations' type
constexpr int MAX_SLICES = 8, MAX_SEGMENTS = 16;
// A warp's weights come through shared memory, CHUNK bytes (8 loads) at a time, some chunks ahead.
constexpr int CHUNK = 4096, CHUNK_LOADS = CHUNK / 512;
template <int F> constexpr int STRIDE = F == NVFP4 ? ITEMS + 2 : MAX_STRIDE;

// Shared memory of a block of WARPS: stages, sums of this turn and the last [warp][brick][column][row], barriers, zeros, x.
// Blocks of 8 warps are for a single row: two fit on a multiprocessor, and one computes while the other begins or ends.
template <int WARPS> struct Layout {
    static constexpr bool SINGLE = WARPS == 8;
    static constexpr int STAGES = 2;
    static constexpr int BLOCKS = SINGLE ? 2 : 1, SUMS = SINGLE ? 16 : 16 * COLUMNS, TABLE = WARPS * 2 * SUMS;
    static constexpr int TABLE_AT = WARPS * STAGES * CHUNK, BARRIERS_AT = TABLE_AT + 2 * TABLE * 4;
    static constexpr int ZEROS_AT = BARRIERS_AT + WARPS * STAGES * 8, ZEROS = SINGLE ? ITEMS : 4;   // items
    static constexpr int X_AT = ZEROS_AT + ZEROS * 8;
    static constexpr int bytes(int columns) { return X_AT + MAX_SLICES * (columns * MAX_STRIDE * 8 + COLUMNS * 4); }
};

struct Params {
    Segment segments[MAX_SEGMENTS];
    const int4* work;         // segment, first unit, units, task (routed) or group of eight rows
    int* task_expert;         // [tasks], -1 beyond the last
    const int* task_pairs;    // [tasks][8], -1 beyond the last
    float* weights;           // [pairs] routing weights
    // A single row has a task for each choice, and blocks that find its expert for themselves.
    const float* logits;      // [experts]; null: the tasks are made already
    const float* bias;        // [experts], or
    const int64_t* table;     // [vocabulary][choices] by
    const int64_t* id;        // the token
    int* chosen;              // [choices], written beside task_expert and weights for whoever wants to know
    int experts;
    float route_scale;
    int choices;              // experts per token
    int rows;                 // of the batch
    float limit;              // of the clamped SwiGLU
    const char* ahead;        // what the next kernel reads first, to be brought to L2 meanwhile; may be null
    int64_t ahead_bytes;
};

template <int N> struct Known { static constexpr int value = N; };

__device__ __forceinline__ uint32_t shared_address(const void* p) { return (uint32_t)__cvta_generic_to_shared(p); }

// Copy one chunk to shared memory without a register or a thread; `barrier` turns when all of it is there.
__device__ __forceinline__ void fetch(uint32_t to, const void* from, uint32_t barrier) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(CHUNK) : "memory");
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 ::"r"(to), "l"(from), "r"(CHUNK), "r"(barrier) : "memory");
}
__device__ __forceinline__ void await(uint32_t barrier, uint32_t parity) {
    asm volatile("{\n.reg .pred p;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@!p bra again;\n}"
                 ::"r"(barrier), "r"(parity) : "memory");
}
// Waits for the warps of one group only.
__device__ __forceinline__ void group_barrier(int group, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(group), "r"(threads) : "memory");
}

__device__ __forceinline__ void mma_f16(float (&d)[4], const uint32_t (&a)[4], const uint2 b) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b.x), "r"(b.y));
}

__device__ __forceinline__ void mma_bf16(float (&d)[4], const uint32_t (&a)[4], const uint2 b) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b.x), "r"(b.y));
}

// d += scales * sums for rows g and g+8 and two blocks, whose four E4M3 scales are in `codes`.
__device__ __forceinline__ void add_scaled(float (&to)[4], const float (&d)[4], uint32_t codes) {
    const float2 l = e4m3_pair(codes), h = e4m3_pair(codes >> 16);
    to[0] = fmaf(l.x, d[0], to[0]); to[1] = fmaf(l.y, d[1], to[1]);
    to[2] = fmaf(h.x, d[2], to[2]); to[3] = fmaf(h.y, d[3], to[3]);
}
__device__ __forceinline__ uint32_t word_of(const uint4& v, int j) { return j == 0 ? v.x : j == 1 ? v.y : j == 2 ? v.z : v.w; }
__device__ __forceinline__ uint2 item_of(const uint4 (&v)[2], int j) {
    return j & 1 ? make_uint2(v[j >> 1].z, v[j >> 1].w) : make_uint2(v[j >> 1].x, v[j >> 1].y);
}
// The sums of four blocks, each in a lane of the quad: every lane learns (b0 + b1) + (b2 + b3).
__device__ __forceinline__ float over_blocks(float a, float b) {
    const float two = a + b;
    return two + __shfl_xor_sync(~0u, two, 1);
}

// A brick of NVFP4 and one vector: even loads in columns 0 to 3 of the tensor core, odd ones in 4 to 7. `x` is this lane's
// place in the vector or in zeros, for both. -> sums of rows g and g+8.
__device__ __forceinline__ float2 nvfp4_single(const uint4* w, const uint2* const (&x)[2], const Scales<NVFP4>& s) {
    float d[4][4] = {}, sum[4] = {};
#pragma unroll
    for (int odd = 0; odd < 2; ++odd) {
#pragma unroll
        for (int pair = 0; pair < 4; ++pair) {
            const int load = 2 * pair + odd;
            const uint4 words = w[load * 32], *items = reinterpret_cast<const uint4*>(x[odd] + load * 16);
            const uint4 b[2] = {items[0], items[1]};
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                uint32_t a[4];
                e2m1(word_of(words, j), a);
                mma_f16(d[pair], a, item_of(b, j));
            }
        }
    }
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) add_scaled(sum, d[pair], s.word[pair]);
    float2 out = make_float2(over_blocks(sum[0], sum[1]), over_blocks(sum[2], sum[3]));
    out.x += __shfl_xor_sync(~0u, out.x, 2);
    out.y += __shfl_xor_sync(~0u, out.y, 2);
    return out;
}

// The same sums in the same order for two vectors a pass: lanes 0 and 1 of a quad have the first's, 2 and 3 the second's.
// `step` takes a lane from load to load in `x`; 0 where it stays with zeros.
template <int PASSES>
__device__ __forceinline__ void nvfp4_many(const uint4* w, const uint2* const (&x)[PASSES], int step, const Scales<NVFP4>& s,
                                           int lane, float2 (&out)[PASSES]) {
    float sum[PASSES][2][4] = {};
#pragma unroll
    for (int load = 0; load < 8; ++load) {
        const uint4 words = w[load * 32];
        const uint32_t codes = __shfl_sync(~0u, s.word[load >> 1], (lane & ~3) | (load & 1) * 2 | (lane & 1));
        uint32_t a[4][4];
#pragma unroll
        for (int j = 0; j < 4; ++j) e2m1(word_of(words, j), a[j]);
#pragma unroll
        for (int pass = 0; pass < PASSES; ++pass) {
            const uint4* items = reinterpret_cast<const uint4*>(x[pass] + load * step);
            const uint4 b[2] = {items[0], items[1]};
            float d[4] = {};
#pragma unroll
            for (int j = 0; j < 4; ++j) mma_f16(d, a[j], item_of(b, j));
            add_scaled(sum[pass][load & 1], d, codes);
        }
    }
#pragma unroll
    for (int pass = 0; pass < PASSES; ++pass) {
        const float (&q)[2][4] = sum[pass];
        out[pass].x = over_blocks(q[0][0], q[0][1]) + over_blocks(q[1][0], q[1][1]);
        out[pass].y = over_blocks(q[0][2], q[0][3]) + over_blocks(q[1][2], q[1][3]);
    }
}

// One load of a tile of another format: 64, 32 or 16 columns. Four sums, so that the tensor core need not wait for itself;
// `block` collects the open FP8 block. `x` is this lane's place in its slice of x.
template <int F>
__device__ __forceinline__ void multiply(const uint4& w, int load, const uint2* x,
                                         const Scales<F>& s, int lane, float (&sums)[4][4], float (&block)[4]) {
    const uint32_t words[4] = {w.x, w.y, w.z, w.w};
    uint32_t a[4];
    float (&sum)[4] = sums[0];
    if constexpr (F == MXFP4) {
        const uint32_t scales = __shfl_sync(~0u, s.word[load & 1], (lane & ~3) | (load >> 1));
#pragma unroll
        for (int j = 0; j < 4; j += 2) {
            float d[4] = {0.f, 0.f, 0.f, 0.f};
            e2m1(words[j], a);
            mma_f16(d, a, x[(load * 4 + j) * 4]);
            e2m1(words[j + 1], a);
            mma_f16(d, a, x[(load * 4 + j + 1) * 4]);
            const float l = e8m0((scales >> (j * 4)) & 255), h = e8m0((scales >> (16 + j * 4)) & 255);
            sum[0] = fmaf(l, d[0], sum[0]); sum[1] = fmaf(l, d[1], sum[1]);
            sum[2] = fmaf(h, d[2], sum[2]); sum[3] = fmaf(h, d[3], sum[3]);
        }
    } else if constexpr (F == FP8) {
#pragma unroll
        for (int m = 0; m < 2; ++m) {
            const uint32_t p = words[2 * m], q = words[2 * m + 1];
            a[0] = e4m3x2(p & 0xFFFF); a[1] = e4m3x2(p >> 16);
            a[2] = e4m3x2(q & 0xFFFF); a[3] = e4m3x2(q >> 16);
            mma_f16(block, a, x[(load * 2 + m) * 4]);
        }
        if ((load & 3) == 3) {
            const float scale = __uint_as_float(s.word[load >> 2]);
#pragma unroll
            for (int i = 0; i < 4; ++i) { sum[i] = fmaf(scale, block[i], sum[i]); block[i] = 0.f; }
        }
    } else {
        a[0] = words[0]; a[1] = words[1]; a[2] = words[2]; a[3] = words[3];
        mma_bf16(sums[load & 3], a, x[load * 4]);
    }
}

template <bool IS_F32> __device__ __forceinline__ float as_act(float v) {
    return IS_F32 ? v : __bfloat162float(__float2bfloat16_rn(v));
}
template <bool IS_F32> __device__ __forceinline__ void put_act(void* y, size_t at, float v) {
    if constexpr (IS_F32) static_cast<float*>(y)[at] = v;
    else static_cast<__nv_bfloat16*>(y)[at] = __float2bfloat16_rn(v);
}

template <int F, int WARPS, bool IS_F32>
__device__ __forceinline__ void run(const Params& p, const Segment& s, const int4 work, char* shared) {
    constexpr int LOADS = Brick<F>::LOADS, SCALE = Brick<F>::SCALE, CHUNKS = LOADS / CHUNK_LOADS;
    constexpr int PER_GROUP = IS_F32 ? COLUMNS / PARTS : COLUMNS, STAGES = Layout<WARPS>::STAGES;
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    const int groups = WARPS / s.warps, group = warp / s.warps, slice = s.first_slice + warp % s.warps;
    const int halves = s.halves, end = work.y + work.z;
    const bool idle = group >= groups;
    int unit = work.y + group;

    // A task: its expert, and in lane i the row of y that column i belongs to, -1 beyond the last.
    int expert = 0, place = -1;
    float routing = 1.f;   // in lane i the routing weight of column i
    if (s.routed) {
        // Logits and tasks are there for `down` before it waits: it starts when all of up's blocks have waited for them.
        if (s.routed == 1) wait_for_earlier();
        if (p.logits) {
            __shared__ Chosen found;
            if (warp == 0) {
                const Chosen mine = Router(p.bias, p.table, p.experts, p.choices, p.route_scale, lane).choose(p.logits, p.id, lane);
                if (lane == work.w) found = mine;
                if (s.routed == 1 && work.w == 0 && work.y == 0 && lane < p.choices) {
                    p.chosen[lane] = p.task_expert[lane] = mine.expert;
                    p.weights[lane] = mine.weight;
                }
            }
            __syncthreads();
            expert = found.expert;
            if (lane == 0) { place = work.w; routing = found.weight; }
        } else {
            expert = __ldcg(p.task_expert + work.w);
            if (lane < COLUMNS) place = __ldcg(p.task_pairs + work.w * COLUMNS + lane);
            if (expert < 0) return;
            if (s.routed == 1 && place >= 0) routing = __ldcg(p.weights + place);
        }
    } else if (lane < PER_GROUP && work.w * PER_GROUP + lane < p.rows) place = work.w * PER_GROUP + lane;
    const int count = __popc(__ballot_sync(~0u, place >= 0));
    // The bricks this warp reads: both halves of a unit lie together, the next unit `jump` bricks on.
    const size_t first = (((size_t)expert * s.units + unit) * s.slices + slice) * halves;
    const size_t jump = (size_t)groups * s.slices * halves - (halves - 1);
    const uint8_t* scale = s.scale + first * SCALE;
    const char* source = reinterpret_cast<const char*>(s.data) + first * (LOADS * 512);
    const uint32_t stage = shared_address(shared) + warp * STAGES * CHUNK;
    const uint32_t barrier = shared_address(shared) + Layout<WARPS>::BARRIERS_AT + warp * STAGES * 8;
    // Where the next chunk to fetch lies: its brick's chunks and halves left, and the warp's units left.
    int chunks_left = CHUNKS, halves_left = halves, units_left = idle || unit >= end ? 0 : (end - unit + groups - 1) / groups;
    uint32_t fetched = 0;
    const auto fetch_next = [&] {
        if (units_left == 0) return;
        if (lane == 0) fetch(stage + fetched % STAGES * CHUNK, source, barrier + fetched % STAGES * 8);
        ++fetched;
        source += CHUNK;
        if (--chunks_left == 0) {
            chunks_left = CHUNKS;
            if (--halves_left == 0) {
                halves_left = halves;
                --units_left;
                source += (jump - 1) * (LOADS * 512);
            }
        }
    };
    if (lane == 0) {
        for (int i = 0; i < STAGES; ++i)
            asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barrier + i * 8) : "memory");
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncwarp();
    for (int i = 0; i < STAGES; ++i) fetch_next();
    Scales<F> now;
    if (!idle && unit < end) now.load(scale, lane);
    if (F == BF16 && lane == 0 && units_left) {   // the rest of the first brick, which does not fit here yet
        const char* rest = reinterpret_cast<const char*>(s.data) + first * (LOADS * 512) + STAGES * CHUNK;
        asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(rest), "r"((CHUNKS - STAGES) * CHUNK));
    }
    if (s.norm && threadIdx.x * 32 < s.k) asm volatile("prefetch.global.L2 [%0];" ::"l"(s.norm + threadIdx.x * 32));
    if (s.routed != 1) wait_for_earlier();   // weights were asked for before the input is there
    let_next_start();                        // not before: what a successor begins with may count on that

    // The rows of x that this task multiplies, of the batch or of the pairs it lists. Groups share them.
    using At = Layout<WARPS>;
    constexpr int X_STRIDE = IS_F32 ? MAX_STRIDE : STRIDE<F>;
    const int stride = At::SINGLE ? 0 : X_STRIDE, slice_stride = stride ? COLUMNS * MAX_STRIDE : MAX_STRIDE;
    uint2* zeros = reinterpret_cast<uint2*>(shared + At::ZEROS_AT);
    uint2* x_table = reinterpret_cast<uint2*>(shared + At::X_AT);
    if (F == NVFP4 && threadIdx.x < At::ZEROS) zeros[threadIdx.x] = make_uint2(0, 0);
    float* undo_table = reinterpret_cast<float*>(x_table + s.warps * slice_stride);   // [slice][column]
    for (int c = 0; c < count; ++c) {
        int row = __shfl_sync(~0u, place, c);
        if (s.routed == 1) row /= p.choices;
        const void* x = static_cast<const char*>(s.x) + (size_t)row * s.x_stride * (IS_F32 ? 4 : 2);
        for (int i = warp - c * s.warps % WARPS; i < s.warps; i += WARPS) {
            if (i < 0) continue;
            const float undo = load_x<F != BF16, IS_F32>(x, (s.first_slice + i) * SLICE, s, lane, x_table + i * slice_stride + c * (IS_F32 ? PARTS : 1) * stride);
            if (lane == 0) undo_table[i * COLUMNS + c] = undo;
        }
    }
    __syncthreads();
    if (idle) return;
    const uint2* slice_x = x_table + (slice - s.first_slice) * slice_stride;
    const float* undo = undo_table + (slice - s.first_slice) * COLUMNS;

    // What the sums of a turn need: half a warp's factor.
    const float factor = __ldg(s.factor + expert * halves + (halves == 2 ? lane >> 4 : 0)) * (F <= MXFP4 ? 16384.f : 1.f);
    // A turn is two bricks: both halves of a unit, or two units. NVFP4 takes two vectors at a time.
    const bool paired = halves == 2;
    const auto turns = [&](auto known) {
        constexpr int PASSES = decltype(known)::value;
        [[maybe_unused]] const bool is_block = t == (g & 3);   // NVFP4: this lane's block is the one that its column takes
        const uint2* x[At::SINGLE ? 2 : PASSES];
        if constexpr (F == NVFP4 && At::SINGLE) {
            x[0] = is_block && g < 4 ? slice_x + 4 * t : zeros;
            x[1] = is_block && g >= 4 ? slice_x + 4 * t : zeros;
        } else if constexpr (F == NVFP4) {
#pragma unroll
            for (int pass = 0; pass < PASSES; ++pass)
                x[pass] = is_block ? slice_x + (pass * (IS_F32 ? PARTS : 2) + (g >> 2)) * stride + 4 * t : zeros;
        } else x[0] = slice_x + g * stride + t;
        uint32_t taken = 0;
        for (int turn = 0; unit < end; unit += paired ? groups : 2 * groups, ++turn) {
            float* table = reinterpret_cast<float*>(shared + At::TABLE_AT) + (turn & 1) * At::TABLE;
            for (int sub = 0; sub < 2 && (paired || unit + sub * groups < end); ++sub) {
                scale += (paired && sub == 0 ? 1 : jump) * SCALE;
                const bool more = paired ? sub == 0 || unit + groups < end : unit + (sub + 1) * groups < end;
                [[maybe_unused]] float sums[4][4] = {}, block[4] = {0.f, 0.f, 0.f, 0.f};
                float* out = table + (warp * 2 + sub) * At::SUMS + g;   // [column][row]
                Scales<F> next = now;
                if (more) next.load(scale, lane);
#pragma unroll
                for (int chunk = 0; chunk < CHUNKS; ++chunk) {
                    const int at = taken % STAGES;
                    await(barrier + at * 8, taken / STAGES & 1);
                    const uint4* w = reinterpret_cast<const uint4*>(shared + (warp * STAGES + at) * CHUNK) + lane;
                    if constexpr (F == NVFP4 && At::SINGLE) {
                        const float2 both = nvfp4_single(w, x, now);
                        if (t == 0) { out[0] = both.x * undo[0]; out[8] = both.y * undo[0]; }
                    } else if constexpr (F == NVFP4) {
                        float2 both[PASSES];
                        nvfp4_many<PASSES>(w, x, is_block ? 16 : 0, now, lane, both);
#pragma unroll
                        for (int pass = 0; pass < PASSES; ++pass)
                            if ((t & 1) == 0) {
                                const int column = pass * (IS_F32 ? PARTS : 2) + (t >> 1);
                                const float back = undo[IS_F32 ? pass : column];
                                out[column * 16] = both[pass].x * back;
                                out[column * 16 + 8] = both[pass].y * back;
                            }
                    } else {
#pragma unroll
                        for (int i = 0; i < CHUNK_LOADS; ++i)
                            multiply<F>(w[i * 32], chunk * CHUNK_LOADS + i, x[0], now, lane, sums, block);
                    }
                    ++taken;
                    __syncwarp();
                    fetch_next();
                }
                now = next;
                if constexpr (F != NVFP4) {
                    constexpr int SHARE = IS_F32 ? PARTS : 1;
                    float sum[4];
#pragma unroll
                    for (int i = 0; i < 4; ++i) sum[i] = (sums[0][i] + sums[1][i]) + (sums[2][i] + sums[3][i]);
                    if (!At::SINGLE || t == 0) {
                        const float back = undo[2 * t / SHARE];
                        out[(2 * t) * 16] = sum[0] * back;
                        out[(2 * t) * 16 + 8] = sum[2] * back;
                    }
                    if (!At::SINGLE) {
                        const float back = undo[(2 * t + 1) / SHARE];
                        out[(2 * t + 1) * 16] = sum[1] * back;
                        out[(2 * t + 1) * 16 + 8] = sum[3] * back;
                    }
                }
            }
            group_barrier(group, s.warps * 32);
            // One warp per column, another one each turn; the others go on. Lanes are the rows of both bricks.
            const int r = lane & 15, h = lane >> 4, tile = paired ? unit : unit + h * groups, n = tile * 16 + r;
            const bool inside = tile < end && n < s.n;
            for (int c = (warp + turn) % s.warps; c < count; c += s.warps) {
                float total = 0.f;
                const float* in = table + (group * s.warps * 2 + h) * At::SUMS + r;
#pragma unroll
                for (int w = 0; w < MAX_SLICES; ++w)
                    if (w < s.warps) {
                        float whole = 0.f;
                        if constexpr (IS_F32)
                            for (int q = (F == BF16 ? 2 : 1); q >= 0; --q) whole += in[w * 2 * At::SUMS + (c * PARTS + q) * 16];
                        else whole = in[w * 2 * At::SUMS + c * 16];
                        total += whole;
                    }
                const float v = total * factor;
                const int at = __shfl_sync(~0u, place, c);
                size_t to = (size_t)at * s.y_stride + n;
                if (s.routed == 2) to = ((size_t)(at / p.choices) * (p.choices + 1) + at % p.choices) * s.y_stride + n;
                if (paired) {
                    const float weight = __shfl_sync(~0u, routing, c);
                    const float gate = fminf(as_act<IS_F32>(v), p.limit);
                    const float up = fmaxf(fminf(as_act<IS_F32>(__shfl_down_sync(~0u, v, 16)), p.limit), -p.limit);
                    float hidden = gate / (1.f + expf(-gate)) * up;
                    if (s.routed) hidden *= weight;
                    if (h == 0 && inside) put_act<IS_F32>(s.y, to, hidden);
                } else if (inside) {
                    if (s.epilogue == AS_F32) static_cast<float*>(s.y)[to] = v;
                    else put_act<IS_F32>(s.y, to, v);
                }
            }
        }
    };
    if constexpr (F != NVFP4 || At::SINGLE) turns(Known<1>());
    else {
        const int passes = IS_F32 ? count : (count + 1) / 2;
        if (passes <= 1) turns(Known<1>());
        else if (passes == 2 || IS_F32) turns(Known<2>());
        else turns(Known<4>());
    }
}

template <int WARPS, bool IS_F32>
__global__ void __launch_bounds__(WARPS * 32, Layout<WARPS>::BLOCKS) matvec_kernel(const __grid_constant__ Params p) {
    extern __shared__ __align__(128) char shared[];
    const int4 work = __ldg(p.work + blockIdx.x);
    const Segment& s = p.segments[work.x];
    for (int64_t at = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) * 128; at < p.ahead_bytes; at += (int64_t)gridDim.x * blockDim.x * 128)
        asm volatile("prefetch.global.L2 [%0];" ::"l"(p.ahead + at));
    switch (s.format) {
        case NVFP4: run<NVFP4, WARPS, IS_F32>(p, s, work, shared); break;
        case MXFP4: run<MXFP4, WARPS, IS_F32>(p, s, work, shared); break;
        case FP8: run<FP8, WARPS, IS_F32>(p, s, work, shared); break;
        case BF16: run<BF16, WARPS, IS_F32>(p, s, work, shared); break;
    }
}

extern "C" int dsv4_matvec(const Params* p, int blocks, int is_f32, cudaStream_t stream) {
    if (is_f32) return launch(matvec_kernel<16, true>, blocks, 512, Layout<16>::bytes(COLUMNS), 1, stream, *p);
    if (p->rows > 1) return launch(matvec_kernel<16, false>, blocks, 512, Layout<16>::bytes(COLUMNS), 1, stream, *p);
    return launch(matvec_kernel<8, false>, blocks, 256, Layout<8>::bytes(1), 1, stream, *p);
}
