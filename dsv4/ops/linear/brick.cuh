// Decode step: what a warp multiplies. A brick (16 rows of a weight over 512 columns) by mma.m16n8k16, and x
// as that takes it.
#pragma once
#include "fragments.cuh"
#include "round.cuh"
#include "tiles.cuh"

// Parts of a float32 input: FP16 carries 11 bits, BF16 8.
constexpr int COLUMNS = 8, PARTS = 4;
// Items of four columns of x in a slice; a column's stride in shared memory keeps the lanes' banks apart, for
// reads of one item or of two.
constexpr int ITEMS = SLICE / 4, MAX_STRIDE = ITEMS + 4;
template <int F> constexpr int STRIDE = F == NVFP4 ? ITEMS + 2 : MAX_STRIDE;

__device__ __forceinline__ void mma_f16(float (&d)[4], const uint32_t (&a)[4], const uint2 b) {
    multiply_f16(d, a, b.x, b.y);
}
__device__ __forceinline__ void mma_bf16(float (&d)[4], const uint32_t (&a)[4], const uint2 b) {
    multiply_bf16(d, a, b.x, b.y);
}

// One load of each of several NVFP4 bricks, which meet the same x: 64 columns. Code (as e2m1 gives it) times
// E4M3 scale is exact in FP16, so the scale goes into the weight. `x` is this lane's place in its slice of x.
template <int BRICKS>
__device__ __forceinline__ void multiply_nvfp4(const uint4 (&w)[BRICKS], int load, const uint2* x,
                                               const Scales<NVFP4> (&s)[BRICKS], float (&sum)[BRICKS][4]) {
    const uint4* items = reinterpret_cast<const uint4*>(x + load * 16);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        const uint4 two = items[j >> 1];
#pragma unroll
        for (int i = 0; i < BRICKS; ++i) {
            // A lane has one block of 16 columns of rows g and g+8, so two scales; four columns of it at a
            // time.
            const uint32_t pair = e4m3x2((uint16_t)(s[i].word[load >> 1] >> (load & 1) * 16));
            const __half2 scales = *reinterpret_cast<const __half2*>(&pair);
            const __half2 low = __low2half2(scales), high = __high2half2(scales);
            uint32_t a[4];
            e2m1(j == 0 ? w[i].x : j == 1 ? w[i].y : j == 2 ? w[i].z : w[i].w, a);
            a[0] = times(a[0], low);
            a[1] = times(a[1], high);
            a[2] = times(a[2], low);
            a[3] = times(a[3], high);
            mma_f16(sum[i], a, j & 1 ? make_uint2(two.z, two.w) : make_uint2(two.x, two.y));
        }
    }
}

// One load of a tile: 64, 32 or 16 columns. One sum, in the order of prefill_sm90.cuh, so that a token's
// numbers are the same in a prompt; `block` collects the open FP8 block.
template <int F>
__device__ __forceinline__ void multiply(const uint4& w, int load, const uint2* x, const Scales<F>& s,
                                         int lane, float (&sum)[4], float (&block)[4]) {
    const uint32_t words[4] = {w.x, w.y, w.z, w.w};
    uint32_t a[4];
    static_assert(F != NVFP4);
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
            sum[0] = fmaf(l, d[0], sum[0]);
            sum[1] = fmaf(l, d[1], sum[1]);
            sum[2] = fmaf(h, d[2], sum[2]);
            sum[3] = fmaf(h, d[3], sum[3]);
        }
    } else if constexpr (F == FP8) {
#pragma unroll
        for (int m = 0; m < 2; ++m) {
            const uint32_t p = words[2 * m], q = words[2 * m + 1];
            a[0] = e4m3x2(p & 0xFFFF);
            a[1] = e4m3x2(p >> 16);
            a[2] = e4m3x2(q & 0xFFFF);
            a[3] = e4m3x2(q >> 16);
            mma_f16(block, a, x[(load * 2 + m) * 4]);
        }
        if ((load & 3) == 3) {
            const float scale = __uint_as_float(s.word[load >> 2]);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                sum[i] = fmaf(scale, block[i], sum[i]);
                block[i] = 0.f;
            }
        }
    } else {
        a[0] = words[0];
        a[1] = words[1];
        a[2] = words[2];
        a[3] = words[3];
        mma_bf16(sum, a, x[load * 4]);
    }
}

template <bool IS_F32> struct Item {
    using Four = uint2;
};   // four columns of x
template <> struct Item<true> {
    using Four = float4;
};

// Row `row` of x over the slice from column k0 on, zero beyond k: lane l holds columns 4l..4l+3 of every 128.
template <bool IS_F32>
__device__ __forceinline__ void read_x(const void* row, int k0, int k, int lane,
                                       typename Item<IS_F32>::Four (&v)[ITEMS / 32]) {
    using Four = typename Item<IS_F32>::Four;
    const Four* p = static_cast<const Four*>(row) + k0 / 4 + lane;
#pragma unroll
    for (int i = 0; i < ITEMS / 32; ++i) v[i] = k0 + 4 * (lane + 32 * i) < k ? __ldcg(p + 32 * i) : Four{};
}

// The same, copied as it is to items of shared memory, where the warp finds it after `await_copies` and a
// barrier. Past L1, as whatever a step writes is read, but for rows that do not lie at multiples of 16 bytes,
// which no model's step has.
__device__ __forceinline__ void copy_x(const void* row, int k0, int k, bool is_aligned, int lane, uint2* to) {
    const uint2* from = static_cast<const uint2*>(row) + k0 / 4;
    if (is_aligned) {
#pragma unroll
        for (int i = 0; i < ITEMS / 64; ++i) {
            const int item = 2 * (lane + 32 * i), left = k - k0 - 4 * item;   // channels
            copy_some<16>(shared_address(to + item), left > 0 ? from + item : row, max(0, min(left, 8)) * 2);
        }
    } else {
#pragma unroll
        for (int i = 0; i < ITEMS / 32; ++i) {
            const int item = lane + 32 * i, left = k - k0 - 4 * item;
            copy_some<8>(shared_address(to + item), left > 0 ? from + item : row, left > 0 ? 8 : 0);
        }
    }
}

// The same, but that lane l holds columns 16l..16l+15: a block of NVFP4.
__device__ __forceinline__ void read_block(const void* row, int k0, int k, int lane, uint2 (&x)[4]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int column = k0 + 16 * lane + 8 * i;
        const uint4 v = column < k ? __ldcg(static_cast<const uint4*>(row) + column / 8)
                                   : make_uint4(0, 0, 0, 0);
        x[2 * i] = make_uint2(v.x, v.y);
        x[2 * i + 1] = make_uint2(v.z, v.w);
    }
}

// That, into `to` as the tensor core takes it: item i holds columns 4i..4i+3, and a lane has those from
// `first` on, `step` apart. float32 goes to PARTS columns, highest bits first. Returns what undoes the
// scaling.
template <bool IS_F16, bool IS_F32>
__device__ __forceinline__ float put_x(const typename Item<IS_F32>::Four (&v)[ITEMS / 32], int first,
                                       int step, uint2* to) {
    if constexpr (!IS_F32) {
        if constexpr (!IS_F16) {
#pragma unroll
            for (int i = 0; i < ITEMS / 32; ++i) to[first + step * i] = v[i];
            return 1.f;
        }
        const int e = exponent(__uint_as_float(__reduce_max_sync(~0u, largest(v))));
        const float up = scale_up(e);
#pragma unroll
        for (int i = 0; i < ITEMS / 32; ++i) {
            const float2 l = open_bf16(v[i].x), h = open_bf16(v[i].y);
            to[first + step * i] = make_uint2(pack_f16(l.x * up, l.y * up), pack_f16(h.x * up, h.y * up));
        }
        return scale_back(e);
    } else {
        float peak = 0.f;
#pragma unroll
        for (int i = 0; i < ITEMS / 32; ++i)
            peak = fmaxf(fmaxf(peak, fmaxf(fabsf(v[i].x), fabsf(v[i].y))),
                         fmaxf(fabsf(v[i].z), fabsf(v[i].w)));
        for (int i = 16; i; i >>= 1) peak = fmaxf(peak, __shfl_xor_sync(~0u, peak, i));
        const int e = IS_F16 ? exponent(peak) : 127 + 14;
        const float up = scale_up(e);
        for (int i = 0; i < ITEMS / 32; ++i) {
            float4 rest = make_float4(v[i].x * up, v[i].y * up, v[i].z * up, v[i].w * up);
            for (int part = 0; part < (IS_F16 ? 2 : 3); ++part) {
                const uint2 took = IS_F16 ? make_uint2(pack_f16(rest.x, rest.y), pack_f16(rest.z, rest.w))
                                          : make_uint2(pack_bf16(rest.x, rest.y), pack_bf16(rest.z, rest.w));
                to[part * MAX_STRIDE + first + step * i] = took;
                const float2 l = IS_F16 ? __half22float2(*reinterpret_cast<const __half2*>(&took.x))
                                        : open_bf16(took.x);
                const float2 h = IS_F16 ? __half22float2(*reinterpret_cast<const __half2*>(&took.y))
                                        : open_bf16(took.y);
                rest = make_float4(rest.x - l.x, rest.y - l.y, rest.z - h.x, rest.w - h.y);
            }
        }
        return scale_back(e);
    }
}
