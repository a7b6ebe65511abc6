// Prompts: rows of x as the products read them, and which expert meets which rows.
#include "prefill_packed.cuh"

constexpr int ITEMS = SLICE / 16;   // of four columns: what a lane has of a row's slice

struct Packing {
    const __nv_bfloat16* x;
    char* out;               // [groups][slices][SLICE_16], or those of FP8
    const int* pairs;        // [rows] token * choices + choice, -1: none; null: `rows` of each matrix, padded
    const int* num_groups;   // on the device; null: `groups`
    int64_t x_row, x_matrix;
    int groups, slices, k, rows, rows_padded, choices, is_wide;
};

// Where a packed row comes from; null: nowhere, it is zero.
__device__ __forceinline__ const __nv_bfloat16* source(const Packing& p, int row) {
    if (p.pairs) {
        const int pair = __ldcg(p.pairs + row);
        return pair >= 0 ? p.x + pair / p.choices * p.x_row : nullptr;
    }
    return row % p.rows_padded < p.rows
               ? p.x + row % p.rows_padded * p.x_row + row / p.rows_padded * p.x_matrix
               : nullptr;
}

// Lane t of four has word t of chunks 0 to 3; then it has chunk t.
__device__ __forceinline__ uint4 chunk_of_four(const uint32_t (&w)[4], int t) {
    uint2 two[2];   // of chunk t & 1, and of two on, the words of a pair of lanes
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const uint32_t other = __shfl_xor_sync(~0u, t & 1 ? w[2 * i] : w[2 * i + 1], 1);
        two[i] = t & 1 ? make_uint2(other, w[2 * i + 1]) : make_uint2(w[2 * i], other);
    }
    const bool is_upper = t & 2;
    const uint32_t x = __shfl_xor_sync(~0u, is_upper ? two[0].x : two[1].x, 2),
                   y = __shfl_xor_sync(~0u, is_upper ? two[0].y : two[1].y, 2);
    return is_upper ? make_uint4(x, y, two[1].x, two[1].y) : make_uint4(two[0].x, two[0].y, x, y);
}

// A warp has eight rows of one slice, four lanes a row. FP16: as matvec.cu's put_x, scaled by a power of two
// per row and slice.
template <int MODE> __global__ void __launch_bounds__(128, 5) pack_kernel(const __grid_constant__ Packing p) {
    wait_for_prerequisites();
    const int lane = threadIdx.x & 31, r = lane >> 2, t = lane & 3;
    const int at = blockIdx.x * 4 + (threadIdx.x >> 5), eight = at / p.slices, slice = at % p.slices;
    if (eight >= 2 * (p.num_groups ? __ldcg(p.num_groups) : p.groups)) return;
    const __nv_bfloat16* from = source(p, eight * 8 + r);
    uint2 v[ITEMS];
    if (p.is_wide) {   // rows of x begin and end at a multiple of 16 bytes: of BY_16, a lane has a half of
                       // every other sixteen
#pragma unroll
        for (int i = 0; i < ITEMS; i += 2) {
            const int column = slice * SLICE +
                               (MODE == FP16_BY_64 ? i / 4 * 64 + t * 16 + i % 4 * 4 : i * 16 + t * 8);
            const uint4 two = from && column < p.k ? __ldcg(reinterpret_cast<const uint4*>(from + column))
                                                   : make_uint4(0, 0, 0, 0);
            v[i] = make_uint2(two.x, two.y);
            v[i + 1] = make_uint2(two.z, two.w);
        }
    } else
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) {
            const int column = slice * SLICE +
                               (MODE == FP16_BY_64 ? i / 4 * 64 + t * 16 + i % 4 * 4 : i * 16 + t * 4);
            v[i] = from && column < p.k ? __ldcg(reinterpret_cast<const uint2*>(from + column))
                                        : make_uint2(0, 0);
        }
    float undo = 1.f;
    if constexpr (MODE != BF16_BY_16) {
        // Of BF16 without signs the larger is the larger integer (a NaN makes its row NaN, whatever the
        // scale).
        uint32_t peaks = 0;
#pragma unroll
        for (int i = 0; i < ITEMS; ++i)
            peaks = larger(larger(peaks, v[i].x & 0x7FFF7FFF), v[i].y & 0x7FFF7FFF);
        peaks = larger(peaks, __shfl_xor_sync(~0u, peaks, 1));
        peaks = larger(peaks, __shfl_xor_sync(~0u, peaks, 2));
        const Scale16 scale(peaks);
        undo = scale.undo;
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) v[i] = make_uint2(scale.of(v[i].x), scale.of(v[i].y));
    }
    char* to = p.out + at_16(eight * 8, p.slices, slice);
    const int row = eight * 8 + r;
    if (p.is_wide) {
#pragma unroll
        for (int i = 0; i < ITEMS; i += 2) {   // chunk 2 i + t: four lanes write two whole sectors
            uint4 chunk;
            if constexpr (MODE == FP16_BY_64)
                chunk = chunk_of_four({v[i].x, v[i].y, v[i + 1].x, v[i + 1].y}, t);
            else chunk = chunk_of_two(make_uint4(v[i].x, v[i].y, v[i + 1].x, v[i + 1].y), t & 1);
            *reinterpret_cast<uint4*>(to + chunk_16(row, 2 * i + t)) = chunk;
        }
    } else
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) {
            *reinterpret_cast<uint32_t*>(to + chunk_16(row, 2 * i) + t * 4) = v[i].x;
            *reinterpret_cast<uint32_t*>(to + chunk_16(row, 2 * i + 1) + t * 4) = v[i].y;
        }
    if (t == 0) *reinterpret_cast<float*>(to + undo_16(row)) = undo;
}

// The same for FP8: rows are quantised on the way, bit for bit as round.cuh's round_a8 does. A warp has
// eight rows of 256 columns, a lane eight columns of every 32.
__global__ void __launch_bounds__(128, 8) pack_8_kernel(const __grid_constant__ Packing p) {
    wait_for_prerequisites();
    const int lane = threadIdx.x & 31, r = lane >> 2, t = lane & 3;
    const int parts = p.slices * BLOCKS_8;
    const int at = blockIdx.x * 4 + (threadIdx.x >> 5), eight = at / parts, part = at % parts;
    if (eight >= 2 * (p.num_groups ? __ldcg(p.num_groups) : p.groups)) return;
    const __nv_bfloat16* from = source(p, eight * 8 + r);
    uint4 v[COLUMNS_8 / 32];
#pragma unroll
    for (int i = 0; i < COLUMNS_8 / 32; ++i) {
        const int column = part * COLUMNS_8 + i * 32 + t * 8;
        v[i] = make_uint4(0, 0, 0, 0);
        if (from && p.is_wide) {   // rows of x begin and end at a multiple of 16 bytes
            if (column < p.k) v[i] = __ldcg(reinterpret_cast<const uint4*>(from + column));
        } else if (from) {
            uint2 low = make_uint2(0, 0), high = make_uint2(0, 0);
            if (column < p.k) low = __ldcg(reinterpret_cast<const uint2*>(from + column));
            if (column + 4 < p.k) high = __ldcg(reinterpret_cast<const uint2*>(from + column + 4));
            v[i] = make_uint4(low.x, low.y, high.x, high.y);
        }
    }
    char* to = p.out + at_8(eight * 8, parts, part);
#pragma unroll
    for (int block = 0; block < COLUMNS_8 / 128; ++block) {
        uint32_t peaks = 0;
#pragma unroll
        for (int i = block * 4; i < block * 4 + 4; ++i) peaks = larger(peaks, peaks_of(v[i]));
        peaks = larger(peaks, __shfl_xor_sync(~0u, peaks, 1));
        peaks = larger(peaks, __shfl_xor_sync(~0u, peaks, 2));
        const Codes8 codes(peaks);
        char* stage = to + block * 1024 + r * 16 + t % 2 * 8;
#pragma unroll
        for (int i = 0; i < 4; ++i)
            *reinterpret_cast<uint2*>(stage + (i * 2 + t / 2) * 128) = codes.of(v[block * 4 + i]);
        if (t == 0) reinterpret_cast<float*>(to + 2048)[block * 8 + r] = codes.scale;
    }
}

struct Gathering {
    const char* codes;     // [tokens][columns] FP8
    const float* scales;   // [tokens][columns / 128], times 2^-24
    char* out;             // as pack_8_kernel's
    const int* pairs;      // [rows] token * choices + choice, -1: none
    const int* num_groups;
    int parts, choices;   // of 256 columns
};

// Rows that are FP8 already, by pair. A warp has eight rows of 256 columns.
__global__ void __launch_bounds__(128, 8) gather_8_kernel(const __grid_constant__ Gathering p) {
    wait_for_prerequisites();
    const int lane = threadIdx.x & 31, r = lane & 7;
    const int at = blockIdx.x * 4 + (threadIdx.x >> 5), eight = at / p.parts, part = at % p.parts;
    if (eight >= 2 * __ldcg(p.num_groups)) return;
    const int pair = __ldcg(p.pairs + eight * 8 + r);
    const size_t from = (size_t)(pair / p.choices) * p.parts + part;
    uint4 v[4];
#pragma unroll
    for (int i = 0; i < 4; ++i)   // sixteen columns
        v[i] = pair >= 0
                   ? __ldcg(reinterpret_cast<const uint4*>(p.codes + from * COLUMNS_8) + i * 4 + lane / 8)
                   : make_uint4(0, 0, 0, 0);
    char* to = p.out + at_8(eight * 8, p.parts, part);
#pragma unroll
    for (int i = 0; i < 4; ++i) reinterpret_cast<uint4*>(to)[i * 32 + lane] = v[i];
    if (lane < 16)
        reinterpret_cast<float*>(to + 2048)[lane] = pair >= 0 ? __ldcg(p.scales + from * 2 + lane / 8) : 0.f;
}

constexpr int SORT_WARPS = 16, MAX_EXPERTS = SORT_WARPS * 32;

struct Sorting {
    const int64_t* ids;     // [pairs] the chosen experts, -1: none
    const float* weights;   // [pairs]
    int* rows;              // [rows] the pair of a sorted row, -1: none
    float* row_weights;     // [rows]
    int4* tiles;            // expert, first row, rows
    int* counts;            // number of tiles, of groups of rows
    int pairs, cap;
    int first_own,
        own;   // of the experts those that this rank has, whose tiles name them by their number here
};

// Pairs of token and choice by expert, each expert's rows from a multiple of a group on, in the pairs' order.
// A block places its run of pairs, cut into runs of a warp. It counts all pairs to know where: blocks do not
// talk.
__global__ void __launch_bounds__(SORT_WARPS * 32) sort_kernel(const __grid_constant__ Sorting p) {
    __shared__ int next[SORT_WARPS][MAX_EXPERTS];   // counts, then the next row of a warp's pairs
    __shared__ int totals[MAX_EXPERTS],
        earlier[MAX_EXPERTS];   // of all pairs, of those of blocks before this one
    __shared__ int2 sums[SORT_WARPS];
    wait_for_prerequisites();
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, expert = threadIdx.x;
    for (int w = 0; w < SORT_WARPS; ++w) next[w][expert] = 0;
    totals[expert] = earlier[expert] = 0;
    __syncthreads();
    constexpr int AHEAD = 8;   // loads in flight
    int ids[AHEAD];
    const auto load = [&](int at, int stop, int step) {
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
            const uint32_t here = at + i * step < stop ? (uint32_t)__ldcg(p.ids + at + i * step) - p.first_own
                                                       : MAX_EXPERTS;
            ids[i] = here < (uint32_t)p.own ? here : MAX_EXPERTS;
        }
    };
    const int run = (p.pairs + gridDim.x * MAX_EXPERTS - 1) / (gridDim.x * MAX_EXPERTS) * 32;   // of a warp
    const int first = (blockIdx.x * SORT_WARPS + warp) * run, stop = min(p.pairs, first + run),
              of_block = blockIdx.x * SORT_WARPS * run;
    for (int at = threadIdx.x; at < p.pairs; at += AHEAD * MAX_EXPERTS) {
        load(at, p.pairs, MAX_EXPERTS);
#pragma unroll
        for (int i = 0; i < AHEAD; ++i)
            if (ids[i] < MAX_EXPERTS) {
                atomicAdd(&totals[ids[i]], 1);
                if (at + i * MAX_EXPERTS < of_block) atomicAdd(&earlier[ids[i]], 1);
            }
    }
    for (int at = first; at < stop; at += AHEAD * 32) {
        load(at + lane, stop, 32);
#pragma unroll
        for (int i = 0; i < AHEAD; ++i)
            if (ids[i] < MAX_EXPERTS) atomicAdd(&next[warp][ids[i]], 1);
    }
    __syncthreads();
    // Sums over the experts before: x counts groups of rows, y tiles.
    const int count = totals[expert];
    const int2 own = make_int2((count + ROW_GROUP - 1) / ROW_GROUP, (count + p.cap - 1) / p.cap);
    int2 before = own;
    for (int i = 1; i < 32; i *= 2) {
        const int x = __shfl_up_sync(~0u, before.x, i), y = __shfl_up_sync(~0u, before.y, i);
        if (lane >= i) {
            before.x += x;
            before.y += y;
        }
    }
    if (lane == 31) sums[warp] = before;
    __syncthreads();
    for (int w = 0; w < warp; ++w) {
        before.x += sums[w].x;
        before.y += sums[w].y;
    }
    if (blockIdx.x == 0 && expert == MAX_EXPERTS - 1) {
        p.counts[0] = before.y;
        p.counts[1] = before.x;
    }
    before.x -= own.x;
    before.y -= own.y;
    const int row = before.x * ROW_GROUP;
    if (expert % gridDim.x == blockIdx.x) {
        // A last tile of more than 64 rows costs as much as its neighbours: then all are alike.
        const int last = count - (own.y - 1) * p.cap,
                  alike = own.y ? (count + own.y * ROW_GROUP - 1) / (own.y * ROW_GROUP) * ROW_GROUP : 0;
        const int height = last > 64 ? alike : p.cap;
        for (int i = 0; i < own.y; ++i)
            p.tiles[before.y + i] = make_int4(expert, row + i * height, min(height, count - i * height), 0);
        for (int i = count; i < own.x * ROW_GROUP; ++i) {
            p.rows[row + i] = -1;
            p.row_weights[row + i] = 0.f;
        }
    }
    int at_row = row + earlier[expert];
    for (int w = 0; w < SORT_WARPS; ++w) {
        const int its = next[w][expert];
        next[w][expert] = at_row;
        at_row += its;
    }
    __syncthreads();
    for (int at = first; at < stop; at += AHEAD * 32) {
        load(at + lane, stop, 32);
        float weights[AHEAD];
#pragma unroll
        for (int i = 0; i < AHEAD; ++i)
            weights[i] = ids[i] < MAX_EXPERTS ? __ldcg(p.weights + at + i * 32 + lane) : 0.f;
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
            const uint32_t same = __match_any_sync(~0u, ids[i]);
            const int rank = __popc(same & ((1u << lane) - 1));
            if (ids[i] < MAX_EXPERTS) {
                const int to = next[warp][ids[i]] + rank;
                p.rows[to] = at + i * 32 + lane;
                p.row_weights[to] = weights[i];
            }
            __syncwarp();
            if (ids[i] < MAX_EXPERTS && rank == 0) next[warp][ids[i]] += __popc(same);
            __syncwarp();
        }
    }
}

template __global__ void pack_kernel<FP16_BY_64>(const __grid_constant__ Packing);
template __global__ void pack_kernel<FP16_BY_16>(const __grid_constant__ Packing);
template __global__ void pack_kernel<BF16_BY_16>(const __grid_constant__ Packing);
