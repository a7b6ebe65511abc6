// Prompts: y = x Wt for many rows of x, W in 4, 8 or 16 bits, decoded in registers: no copy of W in BF16 is
// made.
//
// W is the left operand of wgmma: a warp's fragment of 16 rows is what the tiles hold (tiles.py). Rows of x
// are the columns of the product, 16 to 144 at a time, in shared memory, where prefill_pack.cu has put them
// in the order of the tensor core. A block has 128 rows of W (of pairs: 64 of each half). Four warps fetch W
// and x into two rings, two warpgroups multiply.
//
// What is here is how data comes and goes. How a tile is summed is a class: prefill_sm90_16.cuh in 16 bits
// with the sums of decode, prefill_sm90_8.cuh in FP8. Neither the number of rows nor their places enter a
// sum.
#pragma once
#include "roles.cuh"
#include "wgmma.cuh"

constexpr int UNITS = 8;
constexpr int CONSUMERS = UNITS * 32, FETCHERS = 4, THREADS = CONSUMERS + FETCHERS * 32;
constexpr int MAX_CARRIED = 128;   // rows of a tile in 16 bits, at most
// Rows of x come in groups: one copy for a block of columns. A thread takes about 100 cycles for a copy of
// any size.
constexpr int ROW_GROUP = 16;
// W comes as 4 KiB of each unit: 512 columns of 4 bits, 128 of 16.
constexpr int W_COPY = 4096, W_STAGE = UNITS * W_COPY;
constexpr int EXCHANGE_ROW = 2 * 2 * 4 * 2 * 32 * 4 /
                             16;   // bytes per row of a tile of pairs: gate and up change hands
constexpr int MAX_STAGES = 16, SMALL_CAP = 32;

// Packed x (prefill_packed.cuh): a block of COLUMNS columns, of eight rows, is EIGHT_BYTES of codes or
// numbers and FLOATS that undo scaling. UNDO_BYTES, of a group of rows, follow a slice's last block instead,
// and lie apart in shared memory. Then padding.
template <int COLUMNS_, int BYTES, int FLOATS, int UNDO, int PADDING> struct Rows {
    static constexpr int COLUMNS = COLUMNS_, BLOCKS = SLICE / COLUMNS, UNDO_BYTES = UNDO;   // of a slice
    static constexpr int EIGHT_BYTES = 8 * COLUMNS * BYTES, EIGHT_STRIDE = EIGHT_BYTES + 4 * FLOATS;
    static constexpr int GROUP_STRIDE = ROW_GROUP / 8 * EIGHT_STRIDE,
                         SLICE_STRIDE = BLOCKS * GROUP_STRIDE + UNDO + PADDING;
};

struct Product {
    const char* data;   // the tiles of W, as in Segment
    const uint8_t* scale;
    const int64_t*
        homes;   // [matrices] bytes from `data` and `scale` on to each one's own; null: one follows the other
    const float* factor;
    const char* x;   // packed: [groups of rows][slices][Rows::SLICE_STRIDE]
    void* y;
    float* carry;   // [blocks][MAX_CARRIED / 2][CONSUMERS]: what is summed before the last part of a split-K
    const int4* tiles;   // matrix, first row, rows; null: `rows` of each matrix, one after the other
    const int* num_tiles;
    const int* places;      // [rows of x] row of y; null: as x
    const float* weights;   // [rows of x] routing weights of pairs; may be null
    int64_t y_row, y_matrix;
    int units, slices, halves, n;
    int matrices, rows, rows_padded;   // without a list of tiles
    int cap;                           // rows of a tile at most
    int part;                          // slices of a part of a split-K
    int is_f32;                        // y's type, else BF16; pairs give BF16
    int has_factors;                   // one of each matrix, else the first is everyone's
    int w_stages, x_stages, x_stage_bytes;
    float limit;
};

struct Tile {
    int matrix, first, rows, unit;
};   // rows of packed x; the block's first unit

// Where a matrix's bricks begin: bytes beyond `data` and `scale`, or bricks.
__device__ __forceinline__ int64_t home_of(const Product& p, int matrix) {
    return p.homes ? __ldcg(p.homes + matrix) : 0;
}
__device__ __forceinline__ size_t first_unit(const Product& p, int matrix) {
    return p.homes ? 0 : (size_t)matrix * p.units;
}

struct Items {   // what a block works through
    int tiles_m, total, tiles_per_matrix;
    const Product& p;
    __device__ __forceinline__ Items(const Product& p) : p(p) {
        tiles_m = (p.units * p.halves + UNITS - 1) / UNITS;
        tiles_per_matrix = (p.rows + p.cap - 1) / p.cap;
        total = (p.tiles ? __ldcg(p.num_tiles) : p.matrices * tiles_per_matrix) * tiles_m;
    }
    __device__ __forceinline__ Tile operator[](int item) const {
        const int tile = item / tiles_m, unit = item % tiles_m * (UNITS / p.halves);
        if (p.tiles) {
            const int4 t = __ldcg(p.tiles + tile);
            return {t.x, t.y, t.z, unit};
        }
        const int matrix = tile / tiles_per_matrix, at = tile % tiles_per_matrix * p.cap;
        return {matrix, matrix * p.rows_padded + at, min(p.cap, p.rows - at), unit};
    }
};

struct Ring {               // a place in a ring of stages
    uint32_t full, empty;   // barriers of stage 0
    int stages, stage = 0;
    uint32_t phase = 0;
    __device__ __forceinline__ Ring(uint32_t barriers, int stages)
        : full(barriers), empty(barriers + MAX_STAGES * 8), stages(stages) {}
    __device__ __forceinline__ void next() {
        if (++stage == stages) {
            stage = 0;
            phase ^= 1;
        }
    }
    __device__ __forceinline__ void await_full() const { await(full + stage * 8, phase); }
    __device__ __forceinline__ void await_empty() const { await(empty + stage * 8, phase ^ 1); }
    // Every fetching warp comes to every stage, also without a copy of its own, and the first says how much
    // all bring. One that did not come could be a lap behind, and take the stage's next phase for this one.
    __device__ __forceinline__ void come(int part, uint32_t bytes) const {
        if (part == 0) arrive_expecting(full + stage * 8, bytes);
        else arrive(full + stage * 8);
    }
    __device__ __forceinline__ void fetch(uint32_t to, const void* from, uint32_t bytes) const {
        copy_bulk(to, from, bytes, full + stage * 8);
    }
};
// A warp is done with a stage. `read`: a word of each of the last loads from it, if no product has used them
// yet. ptxas lets the arrival pass loads that are still on their way, and then the next copy does too. So its
// address needs them: grids are flat, and this adds nothing, which the compiler does not know.
__device__ __forceinline__ void release(uint32_t barrier, int lane, uint32_t read = 0) {
    __syncwarp();
    if (lane == 0) arrive(barrier + (read & (gridDim.z - 1)));
}

struct Consumer {
    const Product& p;
    char* shared;                   // of the block
    uint32_t w_at, x_at, undo_at;   // the rings
    Ring w, x;
    int warp, lane;
};

#ifdef __CUDACC__
__device__ __forceinline__ uint32_t transposed(uint32_t v) {   // of 8x8 numbers of 16 bits
    uint32_t out;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(out) : "r"(v));
    return out;
}
#endif

// Of pairs, one warpgroup has gate, the other up.
__device__ __forceinline__ int unit_of(const Product& p, int warp) { return p.halves == 2 ? warp & 3 : warp; }
__device__ __forceinline__ int half_of(const Product& p, int warp) {
    return p.halves == 2 ? warp >> 2 & 1 : 0;
}

// The scales of a warp's first slice of a tile.
template <int F> __device__ __forceinline__ const uint8_t* scales_of(const Consumer& c, const Tile& tile) {
    const Product& p = c.p;
    const int unit = min(tile.unit + unit_of(p, c.warp), p.units - 1);
    const size_t brick = ((first_unit(p, tile.matrix) + unit) * p.slices) * p.halves + half_of(p, c.warp);
    return p.scale + home_of(p, tile.matrix) + brick * Brick<F>::SCALE;
}

// Numbers m and m+1 of a row of y.
__device__ __forceinline__ void put_pair(__nv_bfloat16* y, uint32_t v, int m, int n) {
    if (m + 1 < n && (reinterpret_cast<uintptr_t>(y + m) & 3) == 0) *reinterpret_cast<uint32_t*>(y + m) = v;
    else {
        if (m < n) y[m] = {(uint16_t)v};
        if (m + 1 < n) y[m + 1] = {(uint16_t)(v >> 16)};
    }
}
// Sixteen numbers of a row, by four lanes: of lane t, `low` has 2t and 2t+1, `high` the same eight on. Lanes
// swap words, so that each has four neighbours, from `first_of_four` on, and together they store a whole
// sector.
__device__ __forceinline__ int first_of_four(int t) { return (t & 1) * 8 + (t >> 1) * 4; }
__device__ __forceinline__ uint2 swapped(uint32_t low, uint32_t high, int t) {
    const bool is_odd = t & 1;
    const uint32_t other = __shfl_xor_sync(~0u, is_odd ? low : high, 1);
    return is_odd ? make_uint2(other, high) : make_uint2(low, other);
}
__device__ __forceinline__ void put_four(__nv_bfloat16* y, uint2 v, int m, int n) {
    if (m + 3 < n && (reinterpret_cast<uintptr_t>(y + m) & 7) == 0) *reinterpret_cast<uint2*>(y + m) = v;
    else {
        put_pair(y, v.x, m, n);
        put_pair(y, v.y, m + 2, n);
    }
}
__device__ __forceinline__ int row_of_y(const Product& p, const Tile& tile, int row) {
    const int at = tile.first + row;
    return p.places ? __ldcg(p.places + at) : p.tiles ? at : at - tile.matrix * p.rows_padded;
}

template <int N>
__device__ __forceinline__ void store_tile(const Consumer& c, const Tile& tile, float (&total)[N / 2]) {
    const Product& p = c.p;
    const int g = c.lane >> 2, t = c.lane & 3, m = (tile.unit + c.warp) * 16;
    if (p.is_f32) {
        float* y = static_cast<float*>(p.y) + tile.matrix * p.y_matrix + m + g;
#pragma unroll
        for (int i = 0; i < N / 2; ++i) {   // i & 1: row of x, i & 2: row of W
            const int row = i / 4 * 8 + 2 * t + (i & 1);
            if (row < tile.rows && m + g + (i & 2) * 4 < p.n)
                y[row_of_y(p, tile, row) * p.y_row + (i & 2) * 4] = total[i];
        }
        return;
    }
    __nv_bfloat16* y = static_cast<__nv_bfloat16*>(p.y) + tile.matrix * p.y_matrix;
    // What waits for memory or for other lanes is asked for together.
    int rows[N / 8];
    uint2 four[N / 8];
#pragma unroll
    for (int i = 0; i < N / 8; ++i) rows[i] = i * 8 + g < tile.rows ? row_of_y(p, tile, i * 8 + g) : -1;
#pragma unroll
    for (int i = 0; i < N / 8; ++i) {
        const uint32_t low = transposed(pack_bf16(total[4 * i], total[4 * i + 1])),
                       high = transposed(pack_bf16(total[4 * i + 2], total[4 * i + 3]));
        four[i] = swapped(low, high, t);
    }
#pragma unroll
    for (int i = 0; i < N / 8; ++i)
        if (rows[i] >= 0) put_four(y + rows[i] * p.y_row, four[i], m + first_of_four(t), p.n);
    __syncwarp();
}

__device__ __forceinline__ float swiglu(float gate, float up, float limit) {
    gate = at_most(gate, limit);
    up = at_least(at_most(up, limit), -limit);
    return gate / (1.f + expf(-gate)) * up;
}
__device__ __forceinline__ void consumer_barrier() { some_threads_meet<1, CONSUMERS>(); }

// One warpgroup has gate, the other up of the same rows: each finishes half of the rows of x.
template <int N>
__device__ __forceinline__ void store_pairs(const Consumer& c, const Tile& tile, float (&total)[N / 2],
                                            uint32_t* exchange) {
    const Product& p = c.p;
    constexpr int HALF = N / 16;
    const int mine = half_of(p, c.warp), unit = unit_of(p, c.warp), g = c.lane >> 2, t = c.lane & 3,
              m = (tile.unit + unit) * 16;
    // [who finishes][gate, up][unit][group of eight rows of x][half of the rows of W][lane]
    const auto at = [&](int whose, int kind) {
        return exchange + ((whose * 2 + kind) * 4 + unit) * (HALF * 64) + c.lane;
    };
#pragma unroll
    for (int i = 0; i < N / 8; ++i)
#pragma unroll
        for (int h = 0; h < 2; ++h)
            at(i / HALF, mine)[(i % HALF * 2 + h) * 32] = pack_bf16(total[4 * i + 2 * h],
                                                                    total[4 * i + 2 * h + 1]);
    const auto weights_of = [&](int i) {
        const int group = (mine * HALF + i) * 8;
        if (!p.weights || group >= tile.rows) return make_float2(1.f, 1.f);
        return __ldcg(reinterpret_cast<const float2*>(p.weights + tile.first + group) + t);
    };
    float2 ahead = weights_of(0);
    consumer_barrier();
    const uint32_t *gates = at(mine, 0), *ups = at(mine, 1);
#pragma unroll 1
    for (int i = 0; i < HALF; ++i) {
        const int group = (mine * HALF + i) * 8;
        const float2 by = ahead;
        if (i + 1 < HALF) ahead = weights_of(i + 1);
        uint32_t hidden[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const float2 gate = open_bf16(gates[(i * 2 + h) * 32]), up = open_bf16(ups[(i * 2 + h) * 32]);
            float v = swiglu(gate.x, up.x, p.limit), w = swiglu(gate.y, up.y, p.limit);
            if (p.weights) {
                v *= by.x;
                w *= by.y;
            }
            hidden[h] = transposed(pack_bf16(v, w));
        }
        __nv_bfloat16* to = static_cast<__nv_bfloat16*>(p.y) + row_of_y(p, tile, group + g) * p.y_row;
        const uint2 four = swapped(hidden[0], hidden[1], t);
        if (group + g < tile.rows) put_four(to, four, m + first_of_four(t), p.n);
        __syncwarp();
    }
    consumer_barrier();   // all have read what was exchanged
}

// `after`: the block's next tile, for what can be asked for early.
template <class Sum, int N>
__device__ __forceinline__ void multiply_tile(Sum& sum, Consumer& c, const Tile& tile, const Tile& after,
                                              uint32_t* exchange) {
    float total[N / 2];
    sum.template tile<N>(c, tile, after, total);
    if (c.p.halves == 2) store_pairs<N>(c, tile, total, exchange);
    else store_tile<N>(c, tile, total);
}

// `part`: of the WARPS that share a stage's copies.
template <int F, int WARPS>
__device__ __forceinline__ void fetch_w(const Product& p, Ring ring, uint32_t to, int lane, int part) {
    const Items items(p);
    constexpr int BRICK = Brick<F>::LOADS * 512;
    const int number = lane * WARPS + part;   // of the copy
    for (int item = blockIdx.x; item < items.total; item += gridDim.x) {
        const Tile tile = items[item];
        const int unit = tile.unit + unit_of(p, number), half = half_of(p, number);
        const bool fetches = number < UNITS && unit < p.units;
        const uint32_t bytes = p.halves * min(UNITS / p.halves, p.units - tile.unit) * W_COPY;
        const size_t brick = ((first_unit(p, tile.matrix) + unit) * p.slices) * p.halves + half;
        const char* from = p.data + home_of(p, tile.matrix) + brick * BRICK;
        for (int slice = 0; slice < p.slices; ++slice, from += (size_t)p.halves * BRICK)
#pragma unroll 1
            for (int at = 0; at < BRICK; at += W_COPY) {
                ring.await_empty();
                if (lane == 0) ring.come(part, bytes);
                __syncwarp();
                if (fetches) ring.fetch(to + ring.stage * W_STAGE + number * W_COPY, from + at, W_COPY);
                ring.next();
            }
    }
}

template <class X, int WARPS>
__device__ __forceinline__ void fetch_x(const Product& p, Ring ring, uint32_t to, uint32_t undo_to, int lane,
                                        int part) {
    const Items items(p);
    const int group = lane * WARPS + part;
    for (int item = blockIdx.x; item < items.total; item += gridDim.x) {
        const Tile tile = items[item];
        const int groups = (tile.rows + ROW_GROUP - 1) / ROW_GROUP, blocks = p.slices * X::BLOCKS;
        const char* from = p.x + ((size_t)(tile.first / ROW_GROUP) + group) * p.slices * X::SLICE_STRIDE;
#pragma unroll 1
        for (int block = 0; block < blocks; ++block, from += X::GROUP_STRIDE) {
            const bool closes = X::UNDO_BYTES && block % X::BLOCKS == X::BLOCKS - 1;
            ring.await_empty();
            if (lane == 0) ring.come(part, groups * (X::GROUP_STRIDE + closes * X::UNDO_BYTES));
            __syncwarp();
            if (group < groups) {
                ring.fetch(to + ring.stage * p.x_stage_bytes + group * X::GROUP_STRIDE, from,
                           X::GROUP_STRIDE);
                if (closes)
                    ring.fetch(undo_to + (ring.stage * (p.cap / ROW_GROUP) + group) * X::UNDO_BYTES,
                               from + X::GROUP_STRIDE, X::UNDO_BYTES);
            }
            if (closes) from += X::SLICE_STRIDE - X::BLOCKS * X::GROUP_STRIDE;
            ring.next();
        }
    }
}

// Shared memory: ring of W, ring of x, ring of what undoes its scaling, what is exchanged, barriers (W full,
// W empty, x full, x empty). IS_SMALL: two blocks on a multiprocessor, for tiles of few rows, which wait for
// latencies.
template <class Sum, bool IS_SMALL> __device__ __forceinline__ void multiply(const Product& p) {
    extern __shared__ __align__(1024) char shared[];   // swizzling goes by the address
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const uint32_t w_at = shared_address(shared), x_at = w_at + p.w_stages * W_STAGE;
    const uint32_t undo_at = x_at + p.x_stages * p.x_stage_bytes,
                   exchange_at = undo_at + p.x_stages * (p.cap / ROW_GROUP) * Sum::X::UNDO_BYTES;
    const uint32_t barriers = exchange_at + (p.halves == 2 ? p.cap * EXCHANGE_ROW : 0);
    if (threadIdx.x < 4 * MAX_STAGES) {   // full: the fetching warps arrive; empty: all consumers' warps do
        const int which = threadIdx.x / MAX_STAGES, count = which % 2 ? UNITS
                                                            : which   ? FETCHERS - Sum::W_WARPS
                                                                      : Sum::W_WARPS;
        open_barrier(barriers + threadIdx.x * 8, count);
        copies_see_barriers();
    }
    __syncthreads();
    const Ring w(barriers, p.w_stages), x(barriers + 2 * MAX_STAGES * 8, p.x_stages);
    if (warp >= UNITS) {
        keep_registers<IS_SMALL ? 32 : 40>();
        const int part = warp - UNITS;
        if (part < Sum::W_WARPS) {
            if (p.tiles)
                wait_for_prerequisites();   // weights are older than any launch, the list of tiles is not
            fetch_w<Sum::FORMAT, Sum::W_WARPS>(p, w, w_at, lane, part);
        } else {
            wait_for_prerequisites();
            fetch_x<typename Sum::X, FETCHERS - Sum::W_WARPS>(p, x, x_at, undo_at, lane, part - Sum::W_WARPS);
        }
    } else {
        take_registers<IS_SMALL ? 104 : 232>();
        wait_for_prerequisites();
        Consumer c{p, shared, w_at, x_at, undo_at, w, x, warp, lane};
        uint32_t* exchange = reinterpret_cast<uint32_t*>(shared + (exchange_at - w_at));
        const Items items(p);
        if (blockIdx.x >= items.total) return;
        Tile tile = items[blockIdx.x];
        Sum sum(c, tile);
        for (int item = blockIdx.x; item < items.total; item += gridDim.x) {
            const int following = item + gridDim.x < items.total ? item + gridDim.x : item;
            Tile after;
            if constexpr (Sum::LOOKS_AHEAD) after = items[following];
            if (tile.rows <= 16) multiply_tile<Sum, 16>(sum, c, tile, after, exchange);
            else if (IS_SMALL || tile.rows <= 32) multiply_tile<Sum, 32>(sum, c, tile, after, exchange);
            else if constexpr (!IS_SMALL) {
                if (tile.rows <= 64) multiply_tile<Sum, 64>(sum, c, tile, after, exchange);
                else if (Sum::MAX_N <= 128 || tile.rows > 128)
                    multiply_tile<Sum, Sum::MAX_N>(sum, c, tile, after, exchange);
                else if constexpr (Sum::MAX_N > 128) multiply_tile<Sum, 128>(sum, c, tile, after, exchange);
            }
            tile = Sum::LOOKS_AHEAD ? after : items[following];
        }
    }
}
