// Prompts: y = x Wt for many rows of x, W in 4, 8 or 16 bits, decoded in registers: no copy of W in BF16 is made.
//
// W is the left operand of wgmma: a warp's 16x16 fragment is what the tiles hold (tiles.py). Rows of x are the columns of
// the product, 16 to 128 at a time, in shared memory, where pack.cu has put them in the order of the tensor core.
// A block has 128 rows of W (of pairs: 64 of each half). Four warps fetch W and x into two rings, two warpgroups multiply.
//
// The arithmetic is that of decode (matvec.cu): FP16 products with x scaled by a power of two per slice, one sum per slice
// inside the tensor core, then the slices one after the other. Neither the number of rows nor their places enter a sum.
#pragma once
#include "tiles.cuh"
#include "wgmma.cuh"

constexpr int UNITS = 8, BLOCK_K = 128, BLOCKS_K = SLICE / BLOCK_K;
constexpr int CONSUMERS = UNITS * 32, THREADS = CONSUMERS + 128;
constexpr int MAX_ROWS = 128;
// Eight rows of x over BLOCK_K columns, then eight floats, in a slice's last block what undoes their scaling.
constexpr int EIGHT_BYTES = 8 * BLOCK_K * 2, EIGHT_STRIDE = EIGHT_BYTES + 32;
// Rows of x come in groups: one copy for a block of columns. A thread takes about 100 cycles for a copy of any size.
constexpr int ROW_GROUP = 16, GROUP_STRIDE = ROW_GROUP / 8 * EIGHT_STRIDE;
// W comes as 4 KiB of each unit: 512 columns of 4 bits, 128 of 16.
constexpr int W_COPY = 4096, W_STAGE = UNITS * W_COPY, X_WARPS = 3;
constexpr int EXCHANGE_ROW = 2 * 2 * 4 * 2 * 32 * 4 / 16;   // bytes per row of a tile: gate and up change hands
constexpr int MAX_STAGES = 16, SMALL_CAP = 32;

struct Product {
    const char* data;       // the tiles of W, as in Segment
    const uint8_t* scale;
    const int64_t* homes;   // [matrices] bytes from `data` and `scale` on to each one's own; null: one follows the other
    const float* factor;
    const char* x;          // packed: [groups of rows][slices][blocks of columns][GROUP_STRIDE]
    void* y;
    float* carry;           // [blocks][MAX_ROWS / 2][CONSUMERS]: what is summed before the last part of a split-K
    const int4* tiles;      // matrix, first row, rows; null: `rows` of each matrix, one after the other
    const int* num_tiles;
    const int* places;      // [rows of x] row of y; null: as x
    const float* weights;   // [rows of x] routing weights of pairs; may be null
    int64_t y_row, y_matrix;
    int units, slices, halves, n;
    int matrices, rows, rows_padded;   // without a list of tiles
    int cap;                // rows of a tile at most
    int part;               // slices of a part of a split-K
    int is_f32;             // y's type, else BF16; pairs give BF16
    int has_factors;        // one of each matrix, else the first is everyone's
    int w_stages, x_stages, x_stage_bytes;
    float limit;
};

struct Tile { int matrix, first, rows, unit; };   // rows of packed x; the block's first unit

// Where a matrix's bricks begin: bytes beyond `data` and `scale`, or bricks.
__device__ __forceinline__ int64_t home_of(const Product& p, int matrix) { return p.homes ? __ldcg(p.homes + matrix) : 0; }
__device__ __forceinline__ size_t first_unit(const Product& p, int matrix) { return p.homes ? 0 : (size_t)matrix * p.units; }

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

struct Ring {   // a place in a ring of stages
    uint32_t full, empty;   // barriers of stage 0
    int stages, stage = 0;
    uint32_t phase = 0;
    __device__ __forceinline__ Ring(uint32_t barriers, int stages) : full(barriers), empty(barriers + MAX_STAGES * 8), stages(stages) {}
    __device__ __forceinline__ void next() {
        if (++stage == stages) { stage = 0; phase ^= 1; }
    }
    __device__ __forceinline__ void await_full() const { await(full + stage * 8, phase); }
    __device__ __forceinline__ void await_empty() const { await(empty + stage * 8, phase ^ 1); }
    __device__ __forceinline__ void expect(uint32_t bytes) const {
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(full + stage * 8), "r"(bytes) : "memory");
    }
    __device__ __forceinline__ void fetch(uint32_t to, const void* from, uint32_t bytes) const {
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                     ::"r"(to), "l"(from), "r"(bytes), "r"(full + stage * 8) : "memory");
    }
};
// A warp is done with a stage.
__device__ __forceinline__ void release(uint32_t barrier, int lane) {
    __syncwarp();
    if (lane == 0) asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

template <int F> constexpr bool IS_BF16 = F == MXFP4 || F == BF16;
template <int F> constexpr int UNIT_BYTES = Brick<F>::LOADS * 512 / BLOCKS_K;   // of a unit in a block of columns
template <int F> constexpr int W_BLOCKS = W_COPY / UNIT_BYTES<F>;               // of columns in a stage of W

__device__ __forceinline__ uint32_t times_bf16(uint32_t a, uint32_t b) {
    uint32_t out;
    asm("mul.bf16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
    return out;
}
// Codes 0 and 255 have one mantissa bit, as in e8m0; both halves of the word.
__device__ __forceinline__ uint32_t e8m0_bf16(uint32_t code) {
    const uint32_t bits = code << 7 | (code == 0 || code == 255 ? 0x40 : 0);
    return bits | bits << 16;
}

// 64 columns of a tile as four fragments: half `chunk` of a block of columns, the slice's `block`th. `w`: this lane's place
// in the stage.
template <int F>
__device__ __forceinline__ void decode(const uint4* w, int chunk, int block, const Scales<F>& s, int lane, uint32_t (&a)[4][4]) {
    if constexpr (F <= MXFP4) {
        const uint4 v = w[chunk * 32];
        const uint32_t words[4] = {v.x, v.y, v.z, v.w};
        if constexpr (F == NVFP4) {
            const uint32_t pair = e4m3x2((uint16_t)(s.word[0] >> chunk * 16));
            const __half2 scales = *reinterpret_cast<const __half2*>(&pair);
            const __half2 low = __low2half2(scales), high = __high2half2(scales);
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                e2m1(words[j], a[j]);
                a[j][0] = times(a[j][0], low); a[j][1] = times(a[j][1], high);
                a[j][2] = times(a[j][2], low); a[j][3] = times(a[j][3], high);
            }
        } else {
            // BF16 holds code times scale: the code's bits as a subnormal number, times 2^126, times the scale.
            const uint32_t scales = __shfl_sync(~0u, s.word[chunk], (lane & ~3) | block);
            uint32_t by[2][2];
#pragma unroll
            for (int i = 0; i < 4; ++i) by[i & 1][i >> 1] = e8m0_bf16(scales >> (i * 8) & 255);
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                e2m1(words[j], a[j]);
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const uint32_t code = (a[j][i] & 0x0E000E00u) >> 3 | (a[j][i] & 0x80008000u);
                    a[j][i] = times_bf16(times_bf16(code, 0x7E807E80u), by[j >> 1][i & 1]);
                }
            }
        }
    } else if constexpr (F == FP8) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const uint4 v = w[(chunk * 2 + i) * 32];
            a[2 * i][0] = e4m3x2(v.x & 0xFFFF); a[2 * i][1] = e4m3x2(v.x >> 16);
            a[2 * i][2] = e4m3x2(v.y & 0xFFFF); a[2 * i][3] = e4m3x2(v.y >> 16);
            a[2 * i + 1][0] = e4m3x2(v.z & 0xFFFF); a[2 * i + 1][1] = e4m3x2(v.z >> 16);
            a[2 * i + 1][2] = e4m3x2(v.w & 0xFFFF); a[2 * i + 1][3] = e4m3x2(v.w >> 16);
        }
    } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const uint4 v = w[(chunk * 4 + i) * 32];
            a[i][0] = v.x; a[i][1] = v.y; a[i][2] = v.z; a[i][3] = v.w;
        }
    }
}

struct Consumer {
    const Product& p;
    char* shared;           // of the block
    uint32_t w_at, x_at;    // the rings
    Ring w, x;
    int warp, lane;
};

// A part of a split-K joins those before it; each thread has its own place.
template <int N>
__device__ __forceinline__ void put_carry(float* carry, float (&total)[N / 2], float factor, bool is_first) {
#pragma unroll
    for (int i = 0; i < N / 2; ++i) {
        const float v = total[i] * factor;
        carry[i * CONSUMERS] = is_first ? v : carry[i * CONSUMERS] + v;
        total[i] = 0.f;
    }
}

// The sums of one tile's 64 rows of W (of a warpgroup) and N rows of x.
template <int F, int N>
__device__ __forceinline__ void sum_tile(Consumer& c, const Tile& tile, float (&total)[N / 2]) {
    const Product& p = c.p;
    const int lane = c.lane;
    // A warp's unit; of pairs, the second warpgroup has the other half.
    const bool paired = p.halves == 2;
    const int unit = min(tile.unit + (paired ? c.warp & 3 : c.warp), p.units - 1), half = paired ? c.warp >> 2 : 0;
    const size_t brick = ((first_unit(p, tile.matrix) + unit) * p.slices) * p.halves + half;
    const uint8_t* scale = p.scale + home_of(p, tile.matrix) + brick * Brick<F>::SCALE;
    const int scale_step = p.halves * Brick<F>::SCALE;
    const float factor = __ldg(p.factor + (p.has_factors ? tile.matrix * p.halves : 0) + half) * (F == NVFP4 ? 16384.f : 1.f);
    const char* w_base = c.shared + (c.w_at - shared_address(c.shared)) + c.warp * W_COPY + lane * 16;
    const char* x_base = c.shared + (c.x_at - shared_address(c.shared)) + EIGHT_BYTES + (lane & 3) * 8;   // what undoes scaling
    float* carry = p.carry + ((size_t)blockIdx.x * (MAX_ROWS / 2)) * CONSUMERS + threadIdx.x;

    float sums[N / 2];
    float blocks[F == FP8 ? N / 2 : 1];   // the sum of an FP8 slice; `sums` then has one block of 128 columns
#pragma unroll
    for (int i = 0; i < N / 2; ++i) total[i] = 0.f;
    uint32_t a[2][4][4];
    Scales<F> now, next;   // `now` is rotated: what this block of columns needs comes first
    now.load(scale, lane);
    const auto decode_next = [&](int chunk, int block) {
        if (chunk == 0 && block % W_BLOCKS<F> == 0) c.w.await_full();
        const char* w = w_base + c.w.stage * W_STAGE + block % W_BLOCKS<F> * UNIT_BYTES<F>;
        decode<F>(reinterpret_cast<const uint4*>(w), chunk, block, now, lane, a[chunk]);
    };
    decode_next(0, 0);
    // One block of columns: multiplied, while the next one is decoded (unless it `ends` the tile).
    const auto multiply_block = [&](int block, bool closes, bool ends) {
        const uint64_t matrix = wgmma_matrix(c.x_at + c.x.stage * p.x_stage_bytes, EIGHT_STRIDE);
        const float by = __uint_as_float(now.word[0]);   // of FP8
        c.x.await_full();
#pragma unroll
        for (int chunk = 0; chunk < 2; ++chunk) {
            wgmma_fence();
#pragma unroll
            for (int j = 0; j < 4; ++j)
                wgmma<IS_BF16<F>>(sums, a[chunk][j], matrix + (chunk * 4 + j) * (256 >> 4), j || chunk || (F != FP8 && block));
            wgmma_commit();
            // Only now a load from shared memory has certainly ended: BF16 goes into a product as it is.
            if (chunk == 1 && block % W_BLOCKS<F> == W_BLOCKS<F> - 1) {
                release(c.w.empty + c.w.stage * 8, lane);
                c.w.next();
            }
            wgmma_wait<1>();   // the other fragments are free
            if (chunk == 0) {
                // The stage before this one has been multiplied with.
                if (F != FP8 && block) release(c.x.empty + (c.x.stage ? c.x.stage - 1 : c.x.stages - 1) * 8, lane);
                decode_next(1, block);
            } else if (!closes || !ends) {
                if (closes) now = next;
                else now.rotate();
                decode_next(0, closes ? 0 : block + 1);
            }
        }
        if constexpr (F == FP8) {
            wgmma_wait<0>();
#pragma unroll
            for (int i = 0; i < N / 2; ++i) blocks[i] = block ? fmaf(by, sums[i], blocks[i]) : by * sums[i];
            if (!closes) release(c.x.empty + c.x.stage * 8, lane);
        }
        if (!closes) c.x.next();
    };
    int left = p.part;   // slices of this part of a split-K
#pragma unroll 1
    for (int slice = 0; slice < p.slices; ++slice) {
        const bool last = slice + 1 == p.slices;
        if (!last) next.load(scale += scale_step, lane);
#pragma unroll
        for (int block = 0; block < BLOCKS_K; ++block) multiply_block(block, block == BLOCKS_K - 1, last);
        if (F != FP8) wgmma_wait<0>();
        const char* undo = x_base + c.x.stage * p.x_stage_bytes;
        const float(&from)[N / 2] = *reinterpret_cast<const float(*)[N / 2]>(F == FP8 ? blocks : sums);
#pragma unroll
        for (int i = 0; i < N / 8; ++i) {
            const float2 by = *reinterpret_cast<const float2*>(undo + i * EIGHT_STRIDE);
            total[4 * i] = fmaf(from[4 * i], by.x, total[4 * i]);
            total[4 * i + 1] = fmaf(from[4 * i + 1], by.y, total[4 * i + 1]);
            total[4 * i + 2] = fmaf(from[4 * i + 2], by.x, total[4 * i + 2]);
            total[4 * i + 3] = fmaf(from[4 * i + 3], by.y, total[4 * i + 3]);
        }
        release(c.x.empty + c.x.stage * 8, lane);
        c.x.next();
        if (--left == 0 && !last) {   // a part of a split-K ends
            put_carry<N>(carry, total, factor, slice < p.part);
            left = p.part;
        }
    }
#pragma unroll
    for (int i = 0; i < N / 2; ++i) {
        total[i] *= factor;
        if (p.slices > p.part) total[i] += carry[i * CONSUMERS];
    }
}

__device__ __forceinline__ uint32_t transposed(uint32_t v) {   // of 8x8 numbers of 16 bits
    uint32_t out;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(out) : "r"(v));
    return out;
}

// Eight rows of y (lane >> 2 is one), numbers m and m+1 of each.
__device__ __forceinline__ void put_pair(__nv_bfloat16* y, uint32_t v, int m, int n) {
    if (m + 1 < n && (reinterpret_cast<uintptr_t>(y + m) & 3) == 0) *reinterpret_cast<uint32_t*>(y + m) = v;
    else {
        if (m < n) y[m] = {(uint16_t)v};
        if (m + 1 < n) y[m + 1] = {(uint16_t)(v >> 16)};
    }
}
__device__ __forceinline__ int64_t row_of_y(const Product& p, const Tile& tile, int row) {
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
            if (row < tile.rows && m + g + (i & 2) * 4 < p.n) y[row_of_y(p, tile, row) * p.y_row + (i & 2) * 4] = total[i];
        }
        return;
    }
    __nv_bfloat16* y = static_cast<__nv_bfloat16*>(p.y) + tile.matrix * p.y_matrix;
#pragma unroll
    for (int i = 0; i < N / 8; ++i) {
        const uint32_t low = transposed(pack_bf16(total[4 * i], total[4 * i + 1])), high = transposed(pack_bf16(total[4 * i + 2], total[4 * i + 3]));
        const int row = i * 8 + g;
        if (row >= tile.rows) continue;
        __nv_bfloat16* to = y + row_of_y(p, tile, row) * p.y_row;
        put_pair(to, low, m + 2 * t, p.n);
        put_pair(to, high, m + 8 + 2 * t, p.n);
    }
}

__device__ __forceinline__ float swiglu(float gate, float up, float limit) {
    gate = at_most(gate, limit);
    up = at_least(at_most(up, limit), -limit);
    return gate / (1.f + expf(-gate)) * up;
}
__device__ __forceinline__ void consumer_barrier() { asm volatile("bar.sync 1, %0;" ::"n"(CONSUMERS) : "memory"); }

// One warpgroup has gate, the other up of the same rows: each finishes half of the rows of x.
template <int N>
__device__ __forceinline__ void store_pairs(const Consumer& c, const Tile& tile, float (&total)[N / 2], uint32_t* exchange) {
    const Product& p = c.p;
    constexpr int HALF = N / 16;
    const int mine = c.warp >> 2, g = c.lane >> 2, t = c.lane & 3, m = (tile.unit + (c.warp & 3)) * 16;
    // [who finishes][gate, up][warp][group of eight rows of x][half of the rows of W][lane]
    const auto at = [&](int whose, int kind) { return exchange + ((whose * 2 + kind) * 4 + (c.warp & 3)) * (HALF * 64) + c.lane; };
#pragma unroll
    for (int i = 0; i < N / 8; ++i)
#pragma unroll
        for (int h = 0; h < 2; ++h)
            at(i / HALF, mine)[(i % HALF * 2 + h) * 32] = pack_bf16(total[4 * i + 2 * h], total[4 * i + 2 * h + 1]);
    consumer_barrier();
    const uint32_t *gates = at(mine, 0), *ups = at(mine, 1);
#pragma unroll 1
    for (int i = 0; i < HALF; ++i) {
        const int group = (mine * HALF + i) * 8;
        float2 by = make_float2(1.f, 1.f);
        if (p.weights && group < tile.rows) by = __ldcg(reinterpret_cast<const float2*>(p.weights + tile.first + group) + t);
        uint32_t hidden[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const float2 gate = open_bf16(gates[(i * 2 + h) * 32]), up = open_bf16(ups[(i * 2 + h) * 32]);
            float v = swiglu(gate.x, up.x, p.limit), w = swiglu(gate.y, up.y, p.limit);
            if (p.weights) { v *= by.x; w *= by.y; }
            hidden[h] = transposed(pack_bf16(v, w));
        }
        if (group + g >= tile.rows) continue;
        __nv_bfloat16* to = static_cast<__nv_bfloat16*>(p.y) + row_of_y(p, tile, group + g) * p.y_row;
        put_pair(to, hidden[0], m + 2 * t, p.n);
        put_pair(to, hidden[1], m + 8 + 2 * t, p.n);
    }
    consumer_barrier();   // all have read what was exchanged
}

template <int F, int N>
__device__ __forceinline__ void multiply_tile(Consumer& c, const Tile& tile, uint32_t* exchange) {
    float total[N / 2];
    sum_tile<F, N>(c, tile, total);
    if (c.p.halves == 2) store_pairs<N>(c, tile, total, exchange);
    else store_tile<N>(c, tile, total);
}

template <int F>
__device__ __forceinline__ void fetch_w(const Product& p, Ring ring, uint32_t to, int lane) {
    const bool paired = p.halves == 2;
    const Items items(p);
    constexpr int BRICK = Brick<F>::LOADS * 512;
    for (int item = blockIdx.x; item < items.total; item += gridDim.x) {
        const Tile tile = items[item];
        const int unit = tile.unit + (paired ? lane & 3 : lane), half = paired ? lane >> 2 & 1 : 0;
        const bool fetches = lane < UNITS && unit < p.units;
        const uint32_t bytes = __popc(__ballot_sync(~0u, fetches)) * W_COPY;
        const size_t brick = ((first_unit(p, tile.matrix) + unit) * p.slices) * p.halves + half;
        const char* from = p.data + home_of(p, tile.matrix) + brick * BRICK;
        for (int slice = 0; slice < p.slices; ++slice, from += (size_t)p.halves * BRICK)
#pragma unroll 1
            for (int at = 0; at < BRICK; at += W_COPY) {
                ring.await_empty();
                if (lane == 0) ring.expect(bytes);
                __syncwarp();
                if (fetches) ring.fetch(to + ring.stage * W_STAGE + lane * W_COPY, from + at, W_COPY);
                ring.next();
            }
    }
}

// `part`: of the X_WARPS that share a stage's groups.
__device__ __forceinline__ void fetch_x(const Product& p, Ring ring, uint32_t to, int lane, int part) {
    const Items items(p);
    const int group = lane * X_WARPS + part;
    for (int item = blockIdx.x; item < items.total; item += gridDim.x) {
        const Tile tile = items[item];
        const int groups = (tile.rows + ROW_GROUP - 1) / ROW_GROUP, blocks = p.slices * BLOCKS_K;
        const char* from = p.x + ((size_t)(tile.first / ROW_GROUP) + group) * blocks * GROUP_STRIDE;
#pragma unroll 1
        for (int block = 0; block < blocks; ++block, from += GROUP_STRIDE) {
            ring.await_empty();
            if (part == 0 && lane == 0) ring.expect(groups * GROUP_STRIDE);
            __syncwarp();
            if (group < groups) ring.fetch(to + ring.stage * p.x_stage_bytes + group * GROUP_STRIDE, from, GROUP_STRIDE);
            ring.next();
        }
    }
}

// Shared memory: ring of W, ring of x, what is exchanged, barriers (W full, W empty, x full, x empty).
// IS_SMALL: two blocks on a multiprocessor, for tiles of few rows, which wait for latencies.
template <int F, bool IS_SMALL>
__global__ void __launch_bounds__(THREADS, IS_SMALL ? 2 : 1) product_kernel(const __grid_constant__ Product p) {
    extern __shared__ __align__(128) char shared[];
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const uint32_t w_at = shared_address(shared), x_at = w_at + p.w_stages * W_STAGE;
    const uint32_t exchange_at = x_at + p.x_stages * p.x_stage_bytes, barriers = exchange_at + p.cap * EXCHANGE_ROW;
    if (threadIdx.x < 4 * MAX_STAGES) {   // full: the fetching warp arrives; empty: all consumers' warps do
        const int count = threadIdx.x / MAX_STAGES % 2 ? UNITS : 1;
        asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barriers + threadIdx.x * 8), "r"(count) : "memory");
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    const Ring w(barriers, p.w_stages), x(barriers + 2 * MAX_STAGES * 8, p.x_stages);
    if (warp >= UNITS) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(IS_SMALL ? 32 : 40));
        if (warp == UNITS) {
            if (p.tiles) wait_for_prerequisites();   // weights are older than any launch, the list of tiles is not
            fetch_w<F>(p, w, w_at, lane);
        } else {
            wait_for_prerequisites();
            fetch_x(p, x, x_at, lane, warp - UNITS - 1);
        }
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(IS_SMALL ? 104 : 232));
        wait_for_prerequisites();
        Consumer c{p, shared, w_at, x_at, w, x, warp, lane};
        uint32_t* exchange = reinterpret_cast<uint32_t*>(shared + (exchange_at - w_at));
        const Items items(p);
        for (int item = blockIdx.x; item < items.total; item += gridDim.x) {
            const Tile tile = items[item];
            if (tile.rows <= 16) multiply_tile<F, 16>(c, tile, exchange);
            else if (IS_SMALL || tile.rows <= 32) multiply_tile<F, 32>(c, tile, exchange);
            else if constexpr (!IS_SMALL) {
                if (F == FP8 || tile.rows <= 64) multiply_tile<F, 64>(c, tile, exchange);
                else if constexpr (F != FP8) multiply_tile<F, 128>(c, tile, exchange);   // FP8 has one sum more
            }
        }
    }
}
