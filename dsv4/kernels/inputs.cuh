// x on its way to the tensor core: read, normalised where a norm comes first, scaled into FP16's range or cut in parts.
#pragma once
#include <type_traits>

#include "tiles.cuh"

constexpr int MAX_NORM = 4;   // slices of an x that is normalised
// Parts of a float32 input: FP16 carries 11 bits, BF16 8.
constexpr int COLUMNS = 8, PARTS = 4;
// Items of four columns of x in a slice; a column's stride in shared memory keeps the lanes' banks apart, for reads of
// one item or of two.
constexpr int ITEMS = SLICE / 4, MAX_STRIDE = ITEMS + 4;

__device__ __forceinline__ uint32_t pack_f16(float a, float b) {
    __half2 h = __floats2half2_rn(a, b);
    return *reinterpret_cast<uint32_t*>(&h);
}
__device__ __forceinline__ uint32_t pack_bf16(float a, float b) {
    __nv_bfloat162 h = __floats2bfloat162_rn(a, b);
    return *reinterpret_cast<uint32_t*>(&h);
}
// The power of two that brings `peak` to [2^14, 2^15), FP16's upper end, as the exponent of its inverse.
__device__ __forceinline__ int exponent(float peak) {
    const int e = (__float_as_uint(peak) >> 23) & 255;
    return e == 0 ? 127 : max(e, 15);
}

// Four columns of x, in float32.
__device__ __forceinline__ float4 open_item(uint2 v) {
    const float2 l = open_bf16(v.x), h = open_bf16(v.y);
    return make_float4(l.x, l.y, h.x, h.y);
}
__device__ __forceinline__ float4 open_item(float4 v) { return v; }
__device__ __forceinline__ void close_item(float4 v, uint2& to) { to = make_uint2(pack_bf16(v.x, v.y), pack_bf16(v.z, v.w)); }
__device__ __forceinline__ void close_item(float4 v, float4& to) { to = v; }
// This lane's columns of the slice from k0 on; zero from column k on.
template <typename Item> __device__ __forceinline__ void load_items(const void* row, int k0, int k, int lane, Item (&v)[ITEMS / 32]) {
    const Item* p = static_cast<const Item*>(row) + k0 / 4 + lane;
#pragma unroll
    for (int i = 0; i < ITEMS / 32; ++i) v[i] = k0 + 4 * (lane + 32 * i) < k ? __ldcg(p + 32 * i) : Item{};
}
// ops.norm of the slice in `v`. Every warp adds up the squares of the whole row for itself, in the same order.
template <typename Item>
__device__ __forceinline__ void normalise(const void* row, int k0, int k, const float* weight, float eps, int lane, Item (&v)[ITEMS / 32]) {
    const float share = 1.f / (float)k;
    Item all[MAX_NORM][ITEMS / 32];
#pragma unroll
    for (int s = 0; s < MAX_NORM; ++s) load_items(row, s * SLICE, k, lane, all[s]);
    float4 w[ITEMS / 32];
#pragma unroll
    for (int i = 0; i < ITEMS / 32; ++i)
        w[i] = k0 + 4 * (lane + 32 * i) < k ? __ldg(reinterpret_cast<const float4*>(weight) + k0 / 4 + lane + 32 * i) : make_float4(0.f, 0.f, 0.f, 0.f);
    float total = 0.f;
#pragma unroll
    for (int s = 0; s < MAX_NORM; ++s)
#pragma unroll
        for (int i = 0; i < ITEMS / 32; ++i) {
            const float4 x = open_item(all[s][i]);
            total += (x.x * x.x + x.y * x.y) + (x.z * x.z + x.w * x.w);
        }
    for (int i = 16; i; i >>= 1) total += __shfl_xor_sync(~0u, total, i);
    const float inv = rsqrtf(total * share + eps);
#pragma unroll
    for (int i = 0; i < ITEMS / 32; ++i) {
        const float4 x = open_item(v[i]);
        close_item(make_float4(w[i].x * (x.x * inv), w[i].y * (x.y * inv), w[i].z * (x.z * inv), w[i].w * (x.w * inv)), v[i]);
    }
}

// Row `row` of x over the slice from column k0 on, into `to` as the tensor core takes it: item i holds columns
// 4i..4i+3. float32 goes to PARTS columns, highest bits first. Returns what undoes the scaling.
template <bool IS_F16, bool IS_F32>
__device__ __forceinline__ float load_x(const void* row, int k0, const Segment& s, int lane, uint2* to) {
    using Item = std::conditional_t<IS_F32, float4, uint2>;
    Item v[ITEMS / 32];
    load_items(row, k0, s.k, lane, v);
    if (s.norm) normalise(row, k0, s.k, s.norm, s.norm_eps, lane, v);
    if constexpr (!IS_F32 && !IS_F16) {
#pragma unroll
        for (int i = 0; i < ITEMS / 32; ++i) to[lane + 32 * i] = v[i];
        return 1.f;
    } else {
        float peak = 0.f;
#pragma unroll
        for (int i = 0; i < ITEMS / 32; ++i) {
            const float4 x = open_item(v[i]);
            peak = fmaxf(fmaxf(peak, fmaxf(fabsf(x.x), fabsf(x.y))), fmaxf(fabsf(x.z), fabsf(x.w)));
        }
        for (int i = 16; i; i >>= 1) peak = fmaxf(peak, __shfl_xor_sync(~0u, peak, i));
        const int e = IS_F16 ? exponent(peak) : 127 + 14;
        const float up = __uint_as_float((uint32_t)(268 - e) << 23);
        constexpr int COUNT = !IS_F32 ? 1 : IS_F16 ? 2 : 3;
#pragma unroll
        for (int i = 0; i < ITEMS / 32; ++i) {
            const float4 x = open_item(v[i]);
            float4 rest = make_float4(x.x * up, x.y * up, x.z * up, x.w * up);
#pragma unroll
            for (int part = 0; part < COUNT; ++part) {
                const uint2 took = IS_F16 ? make_uint2(pack_f16(rest.x, rest.y), pack_f16(rest.z, rest.w))
                                          : make_uint2(pack_bf16(rest.x, rest.y), pack_bf16(rest.z, rest.w));
                to[part * MAX_STRIDE + lane + 32 * i] = took;
                const float2 l = IS_F16 ? __half22float2(*reinterpret_cast<const __half2*>(&took.x)) : open_bf16(took.x);
                const float2 h = IS_F16 ? __half22float2(*reinterpret_cast<const __half2*>(&took.y)) : open_bf16(took.y);
                rest = make_float4(rest.x - l.x, rest.y - l.y, rest.z - h.x, rest.w - h.y);
            }
        }
        return __uint_as_float((uint32_t)(e - 14) << 23);
    }
}
