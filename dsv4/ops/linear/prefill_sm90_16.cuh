// Prompts: prefill_sm90.cuh's sums in 16 bits, for x as it is.
//
// The arithmetic is that of decode (matvec.cu): FP16 products with x scaled by a power of two per slice, one
// sum per slice inside the tensor core, then the slices one after the other.
#pragma once
#include "prefill_sm90.cuh"

using X16 = Rows<128, 2, 0, 64, 64>;   // swizzled
template <int F> constexpr bool IS_BF16 = F == MXFP4 || F == BF16;
template <int F>
constexpr int UNIT_BYTES = Brick<F>::LOADS * 512 / X16::BLOCKS;     // of a unit in a block of columns
template <int F> constexpr int W_BLOCKS = W_COPY / UNIT_BYTES<F>;   // of columns in a stage of W

#ifdef __CUDACC__
__device__ __forceinline__ uint32_t times_bf16(uint32_t a, uint32_t b) {
    uint32_t out;
    asm("mul.bf16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
    return out;
}
#endif
// Codes 0 and 255 have one mantissa bit, as in e8m0; both halves of the word.
__device__ __forceinline__ uint32_t e8m0_bf16(uint32_t code) {
    const uint32_t bits = code << 7 | (code == 0 || code == 255 ? 0x40 : 0);
    return bits | bits << 16;
}

// 64 columns of a tile as four fragments: half `chunk` of a block of columns, the slice's `block`th. `w`:
// this lane's place in the stage.
template <int F>
__device__ __forceinline__ void decode(const uint4* w, int chunk, int block, const Scales<F>& s, int lane,
                                       uint32_t (&a)[4][4]) {
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
                a[j][0] = times(a[j][0], low);
                a[j][1] = times(a[j][1], high);
                a[j][2] = times(a[j][2], low);
                a[j][3] = times(a[j][3], high);
            }
        } else {
            // BF16 holds code times scale: the code's bits as a subnormal number, times 2^126, times the
            // scale.
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
            a[2 * i][0] = e4m3x2(v.x & 0xFFFF);
            a[2 * i][1] = e4m3x2(v.x >> 16);
            a[2 * i][2] = e4m3x2(v.y & 0xFFFF);
            a[2 * i][3] = e4m3x2(v.y >> 16);
            a[2 * i + 1][0] = e4m3x2(v.z & 0xFFFF);
            a[2 * i + 1][1] = e4m3x2(v.z >> 16);
            a[2 * i + 1][2] = e4m3x2(v.w & 0xFFFF);
            a[2 * i + 1][3] = e4m3x2(v.w >> 16);
        }
    } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const uint4 v = w[(chunk * 4 + i) * 32];
            a[i][0] = v.x;
            a[i][1] = v.y;
            a[i][2] = v.z;
            a[i][3] = v.w;
        }
    }
}

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
__device__ __forceinline__ void sum_16(Consumer& c, const Tile& tile, float (&total)[N / 2]) {
    const Product& p = c.p;
    const int lane = c.lane;
    const uint8_t* scale = scales_of<F>(c, tile);
    const int scale_step = p.halves * Brick<F>::SCALE;
    const float factor = __ldg(p.factor + (p.has_factors ? tile.matrix * p.halves : 0) + half_of(p, c.warp)) *
                         (F == NVFP4 ? E2M1_UNIT : 1.f);
    const char* w_base = c.shared + (c.w_at - shared_address(c.shared)) + c.warp * W_COPY + lane * 16;
    const char* undo_base = c.shared + (c.undo_at - shared_address(c.shared)) +
                            (lane & 3) * 8;   // what undoes scaling
    float* carry = p.carry + ((size_t)blockIdx.x * (MAX_CARRIED / 2)) * CONSUMERS + threadIdx.x;

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
        const uint64_t matrix = swizzled_matrix(c.x_at + c.x.stage * p.x_stage_bytes, 16, X16::EIGHT_STRIDE);
        const float by = __uint_as_float(now.word[0]);   // of FP8
        c.x.await_full();
#pragma unroll
        for (int chunk = 0; chunk < 2; ++chunk) {
            wgmma_fence();
#pragma unroll
            for (int j = 0; j < 4; ++j)
                wgmma<IS_BF16<F> ? BF16_BF16 : F16_F16>(sums, a[chunk][j],
                                                        matrix + (chunk * 1024 + j * 32 >> 4),
                                                        j || chunk || (F != FP8 && block));
            wgmma_commit();
            // Only now a load from shared memory has certainly ended: BF16 goes into a product as it is.
            if (chunk == 1 && block % W_BLOCKS<F> == W_BLOCKS<F> - 1) {
                release(c.w.empty + c.w.stage * 8, lane);
                c.w.next();
            }
            wgmma_wait<1>();   // the other fragments are free
            if (chunk == 0) {
                // The stage before this one has been multiplied with.
                if (F != FP8 && block)
                    release(c.x.empty + (c.x.stage ? c.x.stage - 1 : c.x.stages - 1) * 8, lane);
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
        for (int block = 0; block < X16::BLOCKS; ++block)
            multiply_block(block, block == X16::BLOCKS - 1, last);
        if (F != FP8) wgmma_wait<0>();
        const char* undo = undo_base + c.x.stage * (p.cap / ROW_GROUP) * X16::UNDO_BYTES;
        const float (&from)[N / 2] = *reinterpret_cast<const float (*)[N / 2]>(F == FP8 ? blocks : sums);
        uint32_t read = 0;
#pragma unroll
        for (int i = 0; i < N / 8; ++i) {
            const float2 by = *reinterpret_cast<const float2*>(undo + i * (X16::UNDO_BYTES / 2));
            read |= __float_as_uint(by.x);
            total[4 * i] = fmaf(from[4 * i], by.x, total[4 * i]);
            total[4 * i + 1] = fmaf(from[4 * i + 1], by.y, total[4 * i + 1]);
            total[4 * i + 2] = fmaf(from[4 * i + 2], by.x, total[4 * i + 2]);
            total[4 * i + 3] = fmaf(from[4 * i + 3], by.y, total[4 * i + 3]);
        }
        release(c.x.empty + c.x.stage * 8, lane, read);
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

template <int F> struct Sum16 {
    using X = X16;
    static constexpr int FORMAT = F, W_WARPS = 1, MAX_N = F == FP8 ? 112 : 128;   // FP8 has one sum more
    static constexpr bool LOOKS_AHEAD = false;                                    // registers are short
    __device__ __forceinline__ Sum16(const Consumer&, const Tile&) {}
    template <int N>
    __device__ __forceinline__ void tile(Consumer& c, const Tile& tile, const Tile&, float (&total)[N / 2]) {
        sum_16<F, N>(c, tile, total);
    }
};

template <int F, bool IS_SMALL>
__global__ void __launch_bounds__(THREADS, IS_SMALL ? 2 : 1)
    product_kernel(const __grid_constant__ Product p) {
    multiply<Sum16<F>, IS_SMALL>(p);
}
