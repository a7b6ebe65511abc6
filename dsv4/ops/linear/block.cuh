// Decode step: what a block of matvec.cu stands on. Its shared memory; how weights come there, and a single
// row of x, rounded; barriers of some of its warps.
#pragma once
#include "brick.cuh"
#include "round.cuh"

constexpr int MAX_SLICES = 8, MAX_PASSES = 2;
// sm_120 gives a block 99 KiB of shared memory instead of 227 (architectures.py).
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1200
constexpr bool IS_SMALL = true;
#else
constexpr bool IS_SMALL = false;
#endif
// A warp's weights come through shared memory, CHUNK bytes at a time, some chunks ahead.
// Shared memory of a block: sums of this turn and the last [warp][brick][column][row], barriers, x, then
// stages. Blocks of 8 warps are for a single row and for few: two fit on a multiprocessor, and one computes
// while the other begins or ends. A single row's x lies there for all passes. Lanes whose column is beyond
// HELD multiply another's again.
enum Batch { SINGLE_ROW, FEW_ROWS, MANY_ROWS };
template <Batch OF, bool WIDE> struct Layout {
    static constexpr bool SINGLE = OF == SINGLE_ROW, HAS_HALF = OF != MANY_ROWS, IS_WIDE = WIDE;
    static constexpr int HELD = SINGLE ? 1 : HAS_HALF ? 4 : COLUMNS;
    static constexpr int WARPS = HAS_HALF || IS_SMALL ? 8 : 16, CHUNK = !HAS_HALF && IS_SMALL ? 1024 : 4096,
                         MAX_STAGES = SINGLE ? 4 : 2;
    static constexpr int BLOCKS = HAS_HALF ? 2 : 1, SUMS = 16 * HELD, TABLE = WARPS * 2 * SUMS;
    static constexpr int BARRIERS_AT = 2 * TABLE * 4;
    static constexpr int X_AT = BARRIERS_AT + WARPS * MAX_STAGES * 8,
                         X_SLICES = MAX_SLICES * (SINGLE && WIDE ? MAX_PASSES : 1);
    static constexpr int STAGES_AT = X_AT + X_SLICES * (HELD * MAX_STRIDE * 8 + COLUMNS * 4);
};

// Of the table of x, in items: from column to column, from slice to slice.
template <int F, typename At, bool IS_F32> struct Strides {
    static constexpr int COLUMN = IS_F32 ? MAX_STRIDE : STRIDE<F>, SLICE = At::HELD * MAX_STRIDE;
};

constexpr int EVERYONE = 15;   // the number of a barrier
// A twin on the CPU (tests/kernels) has its own of these.
#ifdef __CUDACC__
// Copy one chunk to shared memory without a register or a thread; `barrier` turns when all of it is there.
template <int CHUNK> __device__ __forceinline__ void fetch(uint32_t to, const void* from, uint32_t barrier) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(CHUNK)
                 : "memory");
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
        "l"(from), "r"(CHUNK), "r"(barrier)
        : "memory");
}
__device__ __forceinline__ void open_barrier(uint32_t barrier) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void copies_see_barriers() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
// So many bytes to L2; the line of an address.
__device__ __forceinline__ void prefetch(const void* from, int bytes) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}
__device__ __forceinline__ void prefetch_line(const void* from) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(from));
}
// Waits for the warps of one group only. One number is everyone's, since that of __syncthreads is group 0's;
// sixteen groups are of one warp each and need none.
__device__ __forceinline__ void group_barrier(int group, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(group), "r"(threads) : "memory");
}
#endif
// Those of a warp's stages.
template <int STAGES> __device__ __forceinline__ void open_barriers(uint32_t barrier, int lane) {
    if (lane == 0) {
        for (int i = 0; i < STAGES; ++i) open_barrier(barrier + i * 8);
        copies_see_barriers();
    }
    __syncwarp();
}

template <bool IS_F32> __device__ __forceinline__ float as_act(float v) {
    return IS_F32 ? v : __bfloat162float(__float2bfloat16_rn(v));
}
template <bool IS_F32> __device__ __forceinline__ void put_act(void* y, size_t at, float v) {
    if constexpr (IS_F32) static_cast<float*>(y)[at] = v;
    else static_cast<__nv_bfloat16*>(y)[at] = __float2bfloat16_rn(v);
}

// What a lane adds up when a turn ends: row r of brick h; row n of the weight.
struct Lane {
    int r, h, tile, n;
    __device__ __forceinline__ Lane(int lane, int unit, int groups, bool paired)
        : r(lane & 15), h(lane >> 4), tile(paired ? unit : unit + h * groups), n(tile * 16 + r) {}
};

// 16 channels of a single row, rounded on their way to shared memory; `top`: the largest of the row, for A4.
// Called, not inlined: instructions that are not run would still delay those behind them.
__device__ __noinline__ float put_rounded(uint2 a, uint2 b, uint2 c, uint2 d, uint32_t top, int how,
                                          uint2* to) {
    uint32_t x[8] = {a.x, a.y, b.x, b.y, c.x, c.y, d.x, d.y};
    const int first = 4 * (threadIdx.x & 31);
    if (how == A4) {
        if (is_usual(top)) {
            const Halves row = Halves::of_row(top);
            row.round(x, row.unit_of_block(largest(x)));
#pragma unroll
            for (int i = 0; i < 4; ++i) to[first + i] = make_uint2(x[2 * i], x[2 * i + 1]);
            return row.undo();
        }
        const float scale = row_scale(top), unit = unit_of(block_code(largest(x), scale), scale);
#pragma unroll 1
        for (int i = 0; i < 8; ++i) {
            const float2 two = open_bf16(x[0]);
            const uint32_t rounded = pack_bf16(round_a4(two.x, unit), round_a4(two.y, unit));
#pragma unroll
            for (int k = 0; k < 7; ++k) x[k] = x[k + 1];
            x[7] = rounded;
        }
    } else round_a8(x);
    const uint2 some[ITEMS / 32] = {{x[0], x[1]}, {x[2], x[3]}, {x[4], x[5]}, {x[6], x[7]}};
    return put_x<true, false>(some, first, 1, to);
}
