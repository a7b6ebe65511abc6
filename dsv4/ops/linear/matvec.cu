// Decode step: y = x Wt for one to eight rows of x at a time, W in 4, 8 or 16 bits. Reads each weight once,
// at memory speed.
//
// A weight is cut in tiles of 16 rows and slices of 512 columns; one warp takes one slice of a tile, and
// eight columns of x (the rows of a batch) ride along in the tensor core's n. What a tile holds lies in the
// order in which the lanes of mma.m16n8k16 want it (tiles.py packs it), 16 bytes per lane and load. The sum
// over K has one order whatever the batch: blocks of columns inside the tensor core along the slice, then the
// slices one after the other. A column of the tensor core never sees its neighbours, so a row's result does
// not depend on them.
//
// Eight slices are summed at a time. Of more (WIDE) a block makes two passes over its units, each over half
// of K: x of all columns would not fit in shared memory. The sums of the first pass are the second's first
// summand, and the thread that needs them has written them itself.
#include "batch.cuh"
#include "single.cuh"

// What a block of either kernel does before its products. Returns whether it has any: the block that mixes
// has none.
__device__ __forceinline__ bool begin(const Params& p, const int4& work) {
    if (!p.triggers_late) launch_dependents();
    if (work.x < 0) {
        wait_for_prerequisites();
        if (p.triggers_late) launch_dependents();
        mix(p.mixing, p.rows);
        return false;
    }
    for (int64_t at = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) * 128; at < p.prefetch_bytes;
         at += (int64_t)gridDim.x * blockDim.x * 128)
        prefetch_line(p.prefetch + at);
    return true;
}

template <bool WIDE>
__global__ void __launch_bounds__(Layout<SINGLE_ROW, WIDE>::WARPS * 32, Layout<SINGLE_ROW, WIDE>::BLOCKS)
    single_kernel(const __grid_constant__ Params p) {
    extern __shared__ __align__(128) char shared[];
    const int4 work = __ldg(p.work + blockIdx.x);
    if (!begin(p, work)) return;
    uint32_t fetched = 0;
    const Segment& s = p.segments[work.x];
    switch (s.format) {
        case NVFP4: multiply_row<NVFP4, WIDE>(p, s, work, shared, fetched); break;
        case MXFP4: multiply_row<MXFP4, WIDE>(p, s, work, shared, fetched); break;
        case FP8: multiply_row<FP8, WIDE>(p, s, work, shared, fetched); break;
        case BF16: multiply_row<BF16, WIDE>(p, s, work, shared, fetched); break;
    }
}

template <bool IS_FEW, bool WIDE> using RowsAt = Layout<IS_FEW ? FEW_ROWS : MANY_ROWS, WIDE>;
template <bool IS_F32, bool IS_FEW, bool WIDE>
__global__ void __launch_bounds__(RowsAt<IS_FEW, WIDE>::WARPS * 32, RowsAt<IS_FEW, WIDE>::BLOCKS)
    batch_kernel(const __grid_constant__ Params p) {
    using At = RowsAt<IS_FEW, WIDE>;
    extern __shared__ __align__(128) char shared[];
    int4 work = __ldg(p.work + blockIdx.x);
    if (!begin(p, work)) return;
    const bool is_shared = p.num_shares;
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
        if (work.x < 0)
            wait_for_prerequisites();   // if no block had a share, the launch would be complete too early
    }
    open_barriers<At::MAX_STAGES>(
        shared_address(shared) + At::BARRIERS_AT + (threadIdx.x >> 5) * At::MAX_STAGES * 8, threadIdx.x & 31);
    uint32_t fetched = 0;
    while (work.x >= 0) {
        const Segment& s = p.segments[work.x];
        if (is_shared) work.z = min(work.z, s.units - work.y);
        switch (s.format) {
            case NVFP4: multiply_rows<NVFP4, At, IS_F32>(p, s, work, shared, fetched); break;
            case MXFP4: multiply_rows<MXFP4, At, IS_F32>(p, s, work, shared, fetched); break;
            case FP8: multiply_rows<FP8, At, IS_F32>(p, s, work, shared, fetched); break;
            case BF16: multiply_rows<BF16, At, IS_F32>(p, s, work, shared, fetched); break;
        }
        if (!is_shared) break;
        group_barrier(EVERYONE, At::WARPS * 32);   // x and sums are read
        work = part.next(p.shares, p.num_shares, tasks);
    }
}

// What decode.py launches, with this much shared memory.
template <typename At> constexpr bool takes(int warps, int bytes) {
    return At::WARPS == warps && At::STAGES_AT == bytes && bytes % 128 == 0;
}
static_assert(takes<RowsAt<false, false>>(IS_SMALL ? 8 : 16, IS_SMALL ? 84352 : 100864) &&
              RowsAt<false, true>::STAGES_AT == RowsAt<false, false>::STAGES_AT);
static_assert(takes<RowsAt<true, false>>(8, 42368) && takes<RowsAt<true, true>>(8, 42368));
static_assert(takes<Layout<SINGLE_ROW, false>>(8, 11008) && takes<Layout<SINGLE_ROW, true>>(8, 19712));
template __global__ void batch_kernel<true, false, false>(const __grid_constant__ Params);
template __global__ void batch_kernel<true, false, true>(const __grid_constant__ Params);
template __global__ void batch_kernel<false, false, false>(const __grid_constant__ Params);
template __global__ void batch_kernel<false, false, true>(const __grid_constant__ Params);
template __global__ void batch_kernel<false, true, false>(const __grid_constant__ Params);
template __global__ void batch_kernel<false, true, true>(const __grid_constant__ Params);
template __global__ void single_kernel<false>(const __grid_constant__ Params);
template __global__ void single_kernel<true>(const __grid_constant__ Params);
