// Prefill: rows of x as product.cu reads them, and which expert meets which rows.
#include "tiles.cuh"

constexpr int ITEMS = SLICE / 16;            // of four columns: what a lane has of a row's slice
constexpr int ROW_GROUP = 8, SLICE_BYTES = SLICE * ROW_GROUP * 2 + ROW_GROUP * 4;
enum { FP16_BY_64 = 0, FP16_BY_16 = 1, BF16_BY_16 = 2 };   // how numbers are held, and the columns that mix

struct Packing {
    const __nv_bfloat16* x;
    char* out;              // [groups][slices][SLICE_BYTES]
    const int* tokens;      // [8 * groups] rows of x, -1: none; null: `rows` of each matrix, padded
    const int* num_groups;  // on the device; null: `groups`
    int64_t x_row, x_matrix;
    int groups, slices, k, rows, rows_padded;
};

// A warp has eight rows of one slice; lane (r, t) writes its words of row r side by side with the others.
// FP16: as matvec.cu's put_x, scaled by a power of two per row and slice.
template <int MODE>
__global__ void __launch_bounds__(128) pack_kernel(const __grid_constant__ Packing p) {
    wait_for_prerequisites();
    const int lane = threadIdx.x & 31, r = lane >> 2, t = lane & 3;
    const int at = blockIdx.x * 4 + (threadIdx.x >> 5), group = at / p.slices, slice = at % p.slices;
    if (group >= (p.num_groups ? __ldcg(p.num_groups) : p.groups)) return;
    const int row = group * ROW_GROUP + r;
    const __nv_bfloat16* from = nullptr;
    if (p.tokens) {
        const int token = __ldcg(p.tokens + row);
        if (token >= 0) from = p.x + token * p.x_row;
    } else if (row % p.rows_padded < p.rows) from = p.x + row % p.rows_padded * p.x_row + row / p.rows_padded * p.x_matrix;
    uint2 v[ITEMS];
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        const int column = slice * SLICE + (MODE == FP16_BY_64 ? i / 4 * 64 + t * 16 + i % 4 * 4 : i * 16 + t * 4);
        v[i] = from && column < p.k ? __ldcg(reinterpret_cast<const uint2*>(from + column)) : make_uint2(0, 0);
    }
    float undo = 1.f;
    if constexpr (MODE != BF16_BY_16) {
        float peak = 0.f;
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) {
            const float2 l = open_bf16(v[i].x), h = open_bf16(v[i].y);
            peak = fmaxf(fmaxf(peak, fmaxf(fabsf(l.x), fabsf(l.y))), fmaxf(fabsf(h.x), fabsf(h.y)));
        }
        peak = fmaxf(peak, __shfl_xor_sync(~0u, peak, 1));
        peak = fmaxf(peak, __shfl_xor_sync(~0u, peak, 2));
        const int e = exponent(peak);
        const float up = __uint_as_float((uint32_t)(268 - e) << 23);
        undo = __uint_as_float((uint32_t)(e - 14) << 23);
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) {
            const float2 l = open_bf16(v[i].x), h = open_bf16(v[i].y);
            v[i] = make_uint2(pack_f16(l.x * up, l.y * up), pack_f16(h.x * up, h.y * up));
        }
    }
    char* to = p.out + (size_t)at * SLICE_BYTES;
    uint32_t* words = reinterpret_cast<uint32_t*>(to) + lane;
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        words[i * 64] = v[i].x;
        words[i * 64 + 32] = v[i].y;
    }
    if (t == 0) reinterpret_cast<float*>(to + SLICE * ROW_GROUP * 2)[r] = undo;
}

constexpr int SORT_WARPS = 16, MAX_EXPERTS = SORT_WARPS * 32;

struct Sorting {
    const int64_t* ids;     // [pairs] the chosen experts
    const float* weights;   // [pairs]
    int* tokens;            // [rows] the token of a row of sorted pairs, -1: none
    int* places;            // [rows] token * choices + the choice's rank by expert
    float* row_weights;     // [rows]
    int4* tiles;            // matrix, first row, rows
    int* counts;            // number of tiles, of groups of eight rows
    int pairs, choices, experts, cap;
};

// Pairs of token and choice by expert, each expert's rows from a multiple of eight on, in the pairs' order.
// One block: a warp has a run of pairs and counts them by expert, a thread has an expert.
__global__ void __launch_bounds__(SORT_WARPS * 32) sort_kernel(const __grid_constant__ Sorting p) {
    __shared__ int begin[SORT_WARPS][MAX_EXPERTS];   // counts, then the first row of a warp's pairs
    __shared__ int2 sums[SORT_WARPS];
    wait_for_prerequisites();
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, expert = threadIdx.x;
    for (int w = 0; w < SORT_WARPS; ++w) begin[w][expert] = 0;
    __syncthreads();
    const int run = (p.pairs + SORT_WARPS * 32 - 1) / (SORT_WARPS * 32) * 32, first = warp * run, stop = min(p.pairs, first + run);
    for (int at = first; at < stop; at += 32) {
        const int id = at + lane < stop ? (int)__ldcg(p.ids + at + lane) : MAX_EXPERTS;
        const uint32_t same = __match_any_sync(~0u, id);
        if (id < MAX_EXPERTS && lane == __ffs(same) - 1) begin[warp][id] += __popc(same);
        __syncwarp();
    }
    __syncthreads();
    int count = 0;
    for (int w = 0; w < SORT_WARPS; ++w) {
        const int own = begin[w][expert];
        begin[w][expert] = count;
        count += own;
    }
    // Sums over the experts before: x counts groups of rows, y tiles.
    const int2 own = make_int2((count + ROW_GROUP - 1) / ROW_GROUP, (count + p.cap - 1) / p.cap);
    int2 before = own;
    for (int i = 1; i < 32; i *= 2) {
        const int x = __shfl_up_sync(~0u, before.x, i), y = __shfl_up_sync(~0u, before.y, i);
        if (lane >= i) { before.x += x; before.y += y; }
    }
    if (lane == 31) sums[warp] = before;
    __syncthreads();
    for (int w = 0; w < warp; ++w) { before.x += sums[w].x; before.y += sums[w].y; }
    if (expert == MAX_EXPERTS - 1) { p.counts[0] = before.y; p.counts[1] = before.x; }
    before.x -= own.x; before.y -= own.y;
    const int row = before.x * ROW_GROUP;
    for (int i = 0; i < own.y; ++i) p.tiles[before.y + i] = make_int4(expert, row + i * p.cap, min(p.cap, count - i * p.cap), 0);
    for (int i = count; i < own.x * ROW_GROUP; ++i) {
        p.tokens[row + i] = p.places[row + i] = -1;
        p.row_weights[row + i] = 0.f;
    }
    for (int w = 0; w < SORT_WARPS; ++w) begin[w][expert] += row;
    __syncthreads();
    for (int at = first; at < stop; at += 32) {
        const int pair = at + lane;
        const int id = pair < stop ? (int)__ldcg(p.ids + pair) : MAX_EXPERTS;
        const uint32_t same = __match_any_sync(~0u, id);
        const int earlier = __popc(same & ((1u << lane) - 1));
        if (id < MAX_EXPERTS) {
            const int to = begin[warp][id] + earlier, token = pair / p.choices, choice = pair % p.choices;
            int rank = 0;
            for (int i = 0; i < p.choices; ++i) {
                const int other = (int)__ldcg(p.ids + token * p.choices + i);
                rank += other < id || (other == id && i < choice);
            }
            p.tokens[to] = token;
            p.places[to] = token * p.choices + rank;
            p.row_weights[to] = __ldcg(p.weights + pair);
        }
        __syncwarp();
        if (id < MAX_EXPERTS && earlier == 0) begin[warp][id] += __popc(same);
        __syncwarp();
    }
}

template __global__ void pack_kernel<FP16_BY_64>(const __grid_constant__ Packing);
template __global__ void pack_kernel<FP16_BY_16>(const __grid_constant__ Packing);
template __global__ void pack_kernel<BF16_BY_16>(const __grid_constant__ Packing);
