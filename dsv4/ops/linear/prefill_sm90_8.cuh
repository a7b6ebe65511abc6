// Prompts: prefill_sm90.cuh's sums on FP8 tensor cores, for x in FP8 with a power of two per row and 128
// columns (a8).
//
// FP8 weights go in as they are. A code of MXFP4 becomes E5M2, with its block's scale: v * 2^(scale - top +
// 1), where `top` is the largest scale of its row so far. That is exact while a row's scales lie within 2^16
// of each other, blocks of zeros apart: tiles.py looks at load, and weights of which this is not so keep to
// 16 bits.
//
// FP8 tensor cores keep about 14 bits of a sum, so it ends after 128 columns and is added, times both scales,
// to one in float32: total = sum * scales + total, block after block. That is all the order there is, for any
// number of rows.
#pragma once
#include "prefill_sm90.cuh"

using X8 = Rows<256, 1, 16, 0, 0>;   // floats: [block of 128 columns][row], the scale of x times 2^-X_SHIFT
constexpr int X_SHIFT = 24;          // so that no sum overflows before the weight's scale has entered
constexpr int TOP_SHIFT = 30;   // 2^15, FP16's largest power of two, has this exponent: it belongs to `top`

#ifdef __CUDACC__
__device__ __forceinline__ uint32_t larger16(uint32_t a, uint32_t b) {   // of two pairs of 16 bits
    uint32_t out;
    asm("max.u16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
    return out;
}
#endif
__device__ __forceinline__ float power_of_two(int exponent) {
    return __uint_as_float((uint32_t)max(exponent + 127, 0) << 23);
}

// What turns codes into A's numbers, for a slice of a warp's 16 rows.
template <int F> struct Weights8;

template <> struct Weights8<FP8> {
    static constexpr Operands TYPES = E4M3_E4M3;
    Scales<FP8> now, next;
    float by[2], factor;   // the scale of 128 columns, even and odd
    __device__ __forceinline__ void begin(const Scales<FP8>& first, float f) {
        next = first;
        factor = f;
    }
    __device__ __forceinline__ void prefetch(const uint8_t* scale, int lane) { next.load(scale, lane); }
    __device__ __forceinline__ void start(int) {
        now = next;
        by[0] = __uint_as_float(now.word[0]);
    }
    __device__ __forceinline__ void rotate(int block) { by[block & 1] = __uint_as_float(now.word[block]); }
    template <int N> __device__ __forceinline__ void follow(float (&)[N]) const {}
    __device__ __forceinline__ void decode(const uint4* w, int, int, uint32_t (&a)[4][4]) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const uint4 v = w[i * 32];
            a[i][0] = __byte_perm(v.x, v.y, 0x5410);
            a[i][1] = __byte_perm(v.x, v.y, 0x7632);
            a[i][2] = __byte_perm(v.z, v.w, 0x5410);
            a[i][3] = __byte_perm(v.z, v.w, 0x7632);
        }
    }
    __device__ __forceinline__ float2 scaled(float2 x, int odd) const {
        return make_float2(by[odd] * x.x, by[odd] * x.y);
    }
    __device__ __forceinline__ float finished(float v, int) const {
        return v * (factor * (float)(1 << X_SHIFT));
    }
};

template <> struct Weights8<MXFP4> {
    static constexpr Operands TYPES = E5M2_E4M3;
    Scales<MXFP4> next;
    uint32_t
        powers[2][2];   // [64 columns][row g, row g+8]: of both blocks of 32, as FP16; lane t has 128 columns
    uint32_t tops, before;   // of rows g and g+8: now, and in the slice before
    float factor;
    __device__ __forceinline__ void begin(const Scales<MXFP4>& first, float f) {
        next = first;
        tops = TOP_SHIFT * 0x10001;
        factor = f;
    }
    __device__ __forceinline__ void prefetch(const uint8_t* scale, int lane) { next.load(scale, lane); }
    // A slice begins: the scales that it brings may raise a row's top.
    __device__ __forceinline__ void start(int lane) {
        uint32_t rows[2][2];   // [64 columns][row]: of both blocks of 32
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            rows[i][0] = __byte_perm(next.word[i], 0, 0x4140);
            rows[i][1] = __byte_perm(next.word[i], 0, 0x4342);
        }
        const uint32_t g = larger16(rows[0][0], rows[1][0]), h = larger16(rows[0][1], rows[1][1]);
        uint32_t top = larger16(__byte_perm(g, h, 0x5410),
                                __byte_perm(g, h, 0x7632));   // row g low, row g+8 high
        top = larger16(top, __shfl_xor_sync(~0u, top, 1));
        top = larger16(top, __shfl_xor_sync(~0u, top, 2));
        top = larger16(top, tops);
        before = tops;
        tops = top;
        // Blocks far below the top are zeros, or the weight would not be here: any power of two serves them.
        const uint32_t least[2] = {((top & 0xFFFF) - TOP_SHIFT) * 0x10001,
                                   ((top >> 16) - TOP_SHIFT) * 0x10001};
#pragma unroll
        for (int i = 0; i < 2; ++i)
#pragma unroll
            for (int row = 0; row < 2; ++row)
                powers[i][row] = (larger16(rows[i][row], least[row]) - least[row]) << 10;
    }
    // The sums before this slice, in units of the new top. A branch around it would make the compiler
    // serialise the products.
    template <int N> __device__ __forceinline__ void follow(float (&total)[N]) const {
        const float down[2] = {power_of_two((int)(before & 0xFFFF) - (int)(tops & 0xFFFF)),
                               power_of_two((int)(before >> 16) - (int)(tops >> 16))};
#pragma unroll
        for (int i = 0; i < N; ++i) total[i] *= down[i >> 1 & 1];
    }
    __device__ __forceinline__ void rotate(int) {}
    __device__ __forceinline__ void decode(const uint4* w, int block, int lane, uint32_t (&a)[4][4]) {
        const int from = (lane & ~3) | block;
#pragma unroll
        for (int chunk = 0; chunk < 2; ++chunk) {   // 64 columns
            const uint4 v = w[chunk * 32];
            const uint32_t words[4] = {v.x, v.y, v.z, v.w};
            const uint32_t g = __shfl_sync(~0u, powers[chunk][0], from),
                           h = __shfl_sync(~0u, powers[chunk][1], from);
            const __half2 of_g = *reinterpret_cast<const __half2*>(&g),
                          of_h = *reinterpret_cast<const __half2*>(&h);
            const __half2 by[2][2] = {{__low2half2(of_g), __low2half2(of_h)},
                                      {__high2half2(of_g), __high2half2(of_h)}};
#pragma unroll
            for (int j = 0; j < 4; ++j) {   // sixteen columns
                uint32_t f16[4];            // v * 2^-14
                e2m1(words[j], f16);
#pragma unroll
                for (int i = 0; i < 4; ++i) f16[i] = times(f16[i], by[j >> 1][i & 1]);
                // The upper byte of an FP16 number is an E5M2 number, here the same one.
                a[chunk * 2 + (j >> 1)][j % 2 * 2] = __byte_perm(f16[0], f16[2], 0x7531);
                a[chunk * 2 + (j >> 1)][j % 2 * 2 + 1] = __byte_perm(f16[1], f16[3], 0x7531);
            }
        }
    }
    __device__ __forceinline__ float2 scaled(float2 x, int) const { return x; }
    // `row`: 0 or 1, of g and g+8.
    __device__ __forceinline__ float finished(float v, int row) const {
        return v * power_of_two((int)(tops >> 16 * row & 0xFFFF) - 128) * (factor * (float)(1 << X_SHIFT));
    }
};

// The sums of one tile's 64 rows of W (of a warpgroup) and N rows of x, in two halves of these: while one is
// added to the total, the tensor core multiplies the other. `first`: the scales of the tile's first slice;
// then those of the tile `after` it.
template <int F, int N>
__device__ __forceinline__ void sum_8(Consumer& c, const Tile& tile, const Tile& after, Scales<F>& first,
                                      float (&total)[N / 2]) {
    constexpr int BLOCKS = SLICE / 128,
                  OF_STAGE = X8::COLUMNS / 128;   // of 128 columns: in a slice, in a stage of x
    constexpr int UNIT_BYTES = Brick<F>::LOADS * 512 / BLOCKS, W_BLOCKS = W_COPY / UNIT_BYTES;
    constexpr int CHAINS = N >= 64 ? 2 : 1, PART = N / 2 / CHAINS, EIGHTS = N / 8 / CHAINS;
    const Product& p = c.p;
    const int lane = c.lane;
    const uint8_t* scale = scales_of<F>(c, tile);
    const int scale_step = p.halves * Brick<F>::SCALE;
    const char* w_base = c.shared + (c.w_at - shared_address(c.shared)) + c.warp * W_COPY + lane * 16;
    const char* x_base = c.shared + (c.x_at - shared_address(c.shared)) + X8::EIGHT_BYTES +
                         (lane & 3) * 8;   // the scales of x

    float sums[CHAINS][PART];
#pragma unroll
    for (int i = 0; i < N / 2; ++i) total[i] = 0.f;
    uint32_t a[2][4][4];   // [block, even and odd][32 columns]
    Weights8<F> weights;
    weights.begin(first, __ldg(p.factor + (p.has_factors ? tile.matrix * p.halves : 0) + half_of(p, c.warp)));
    weights.start(lane);
    const auto decode = [&](int block) {
        if (block % W_BLOCKS == 0) c.w.await_full();
        const uint4* w = reinterpret_cast<const uint4*>(w_base + c.w.stage * W_STAGE +
                                                        block % W_BLOCKS * UNIT_BYTES);
        weights.decode(w, block, lane, a[block & 1]);
    };
    const auto multiply = [&](int chain, int block) {
        const uint64_t matrix = wgmma_matrix(
            c.x_at + c.x.stage * p.x_stage_bytes + chain * EIGHTS * X8::EIGHT_STRIDE, X8::EIGHT_STRIDE);
        wgmma_fence();
#pragma unroll
        for (int j = 0; j < 4; ++j)
            wgmma<Weights8<F>::TYPES>(sums[chain], a[block & 1][j],
                                      matrix + (block % OF_STAGE * 1024 + j * 256 >> 4), j);
        wgmma_commit();
    };
    const auto add = [&](int chain, int block, int stage) {   // returns what it read, for `release`
        uint32_t read = 0;
        const char* scales = x_base + stage * p.x_stage_bytes + block % OF_STAGE * 32 +
                             chain * EIGHTS * X8::EIGHT_STRIDE;
#pragma unroll
        for (int i = 0; i < EIGHTS; ++i) {
            const float2 scale = *reinterpret_cast<const float2*>(scales + i * X8::EIGHT_STRIDE);
            const float2 by = weights.scaled(scale, block & 1);
            read |= __float_as_uint(scale.x);
            float* to = total + chain * PART + 4 * i;
            to[0] = fmaf(sums[chain][4 * i], by.x, to[0]);
            to[1] = fmaf(sums[chain][4 * i + 1], by.y, to[1]);
            to[2] = fmaf(sums[chain][4 * i + 2], by.x, to[2]);
            to[3] = fmaf(sums[chain][4 * i + 3], by.y, to[3]);
        }
        return read;
    };
    decode(0);
#pragma unroll 1
    for (int slice = 0; slice < p.slices; ++slice) {
        const bool last = slice + 1 == p.slices;
        weights.prefetch(last ? scales_of<F>(c, after) : scale += scale_step, lane);
        int before = 0;   // the stage of x that the block before has
#pragma unroll
        for (int block = 0; block < BLOCKS; ++block) {
            const bool closes = block == BLOCKS - 1, opens_stage = block % OF_STAGE == 0,
                       closes_stage = block % OF_STAGE == OF_STAGE - 1;
            if (opens_stage) c.x.await_full();
            multiply(0, block);
            // A load from shared memory has certainly ended once a product has used what it brought.
            if (block % W_BLOCKS == W_BLOCKS - 1) {
                release(c.w.empty + c.w.stage * 8, lane);
                c.w.next();
            }
            if constexpr (CHAINS == 2) {
                if (block) {
                    wgmma_wait<1>();
                    const uint32_t read = add(1, block - 1, before);
                    if (opens_stage) release(c.x.empty + before * 8, lane, read);
                }
                multiply(1, block);
            }
            if (!closes || !last) {
                if (closes) weights.start(lane);
                else weights.rotate(block + 1);
                decode(closes ? 0 : block + 1);
            }
            wgmma_wait<CHAINS - 1>();
            uint32_t read = add(0, block, c.x.stage);
            if (CHAINS == 2 && closes) {   // a slice ends alone: what is in flight around a loop, the
                                           // compiler would wait for
                wgmma_wait<0>();
                read |= add(1, block, c.x.stage);
            }
            before = c.x.stage;
            if (closes_stage) {
                if (CHAINS == 1 || closes) release(c.x.empty + c.x.stage * 8, lane, read);
                c.x.next();
            }
        }
        if (!last) weights.follow(total);
    }
#pragma unroll
    for (int i = 0; i < N / 2; ++i) total[i] = weights.finished(total[i], i >> 1 & 1);
    first = weights.next;
}

template <int F> struct Sum8 {
    using X = X8;
    static constexpr int FORMAT = F, W_WARPS = 2, MAX_N = 144;
    static constexpr bool LOOKS_AHEAD = true;
    Scales<F> first;   // of the next tile
    __device__ __forceinline__ Sum8(const Consumer& c, const Tile& tile) {
        first.load(scales_of<F>(c, tile), c.lane);
    }
    template <int N>
    __device__ __forceinline__ void tile(Consumer& c, const Tile& tile, const Tile& after,
                                         float (&total)[N / 2]) {
        sum_8<F, N>(c, tile, after, first, total);
    }
};

template <int F, bool IS_SMALL>
__global__ void __launch_bounds__(THREADS, IS_SMALL ? 2 : 1)
    product_kernel(const __grid_constant__ Product p) {
    multiply<Sum8<F>, IS_SMALL>(p);
}
