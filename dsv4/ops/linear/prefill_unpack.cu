// Prompts: weights in tiles as rows of BF16 or float32 again, since many rows are multiplied with each.
#include "tiles.cuh"

// Four or eight neighbours of a row at once, of which `left` are inside it; rows begin at a multiple of four.
__device__ __forceinline__ void put(float* to, const float (&v)[1][4], int) {
    *reinterpret_cast<float4*>(to) = make_float4(v[0][0], v[0][1], v[0][2], v[0][3]);
}
__device__ __forceinline__ uint2 four(const float (&v)[4]) {
    __nv_bfloat162 a = __floats2bfloat162_rn(v[0], v[1]), b = __floats2bfloat162_rn(v[2], v[3]);
    return make_uint2(*reinterpret_cast<uint32_t*>(&a), *reinterpret_cast<uint32_t*>(&b));
}
__device__ __forceinline__ void put(__nv_bfloat16* to, const float (&v)[1][4], int) {
    *reinterpret_cast<uint2*>(to) = four(v[0]);
}
__device__ __forceinline__ void put(float* to, const float (&v)[2][4], int left) {
    *reinterpret_cast<float4*>(to) = make_float4(v[0][0], v[0][1], v[0][2], v[0][3]);
    if (left > 4) *reinterpret_cast<float4*>(to + 4) = make_float4(v[1][0], v[1][1], v[1][2], v[1][3]);
}
__device__ __forceinline__ void put(__nv_bfloat16* to, const float (&v)[2][4], int left) {
    const uint2 a = four(v[0]), b = four(v[1]);
    if (left > 4 && reinterpret_cast<uintptr_t>(to) % 16 == 0)
        *reinterpret_cast<uint4*>(to) = make_uint4(a.x, a.y, b.x, b.y);
    else {
        *reinterpret_cast<uint2*>(to) = a;
        if (left > 4) *reinterpret_cast<uint2*>(to + 4) = b;
    }
}

// A bank's matrices first .. first+count-1 as rows of BF16 or float32, without the factor; of pairs, w1's
// rows come first.
template <int F, typename Out>
__device__ __forceinline__ void unpack_brick(const Segment& s, int64_t brick, Out* y, int lane) {
    const int h = brick % s.halves, slice = brick / s.halves % s.slices;
    const int64_t unit = brick / s.halves / s.slices, matrix = unit / s.units;
    const int tile = unit % s.units, g = lane >> 2, t = lane & 3;
    Scales<F> scales;
    // Of matrices with places, the brick's number in its own.
    const int64_t place = s.places ? __ldcg(s.places + matrix) : 0;
    const int64_t at = s.places ? brick - matrix * s.units * s.slices * s.halves : brick;
    scales.load(s.scale + place + at * Brick<F>::SCALE, lane);
    const uint4* data = s.data + place / 16 + at * (Brick<F>::LOADS * 32) + lane;
    Out* out = y + matrix * s.n * s.halves * s.k;
#pragma unroll
    for (int load = 0; load < Brick<F>::LOADS; ++load) {
        const uint4 w = stream(data + load * 32);
        const uint32_t words[4] = {w.x, w.y, w.z, w.w};
        constexpr int STEPS = F <= MXFP4 ? 4 : F == FP8 ? 2 : 1, TOGETHER = F == NVFP4 ? 2 : 1;
        float values[2][TOGETHER][4];   // a lane's columns of rows g and g+8, as many as lie side by side
#pragma unroll
        for (int j = 0; j < STEPS; ++j) {
            uint32_t a[4];
            float low = 1.f, high = 1.f;
            if constexpr (F == NVFP4) {
                const float2 pair = e4m3_values((uint16_t)(scales.word[load >> 1] >> (load & 1) * 16));
                low = E2M1_UNIT * pair.x;
                high = E2M1_UNIT * pair.y;
                e2m1(words[j], a);
            } else if constexpr (F == MXFP4) {
                const uint32_t v = __shfl_sync(~0u, scales.word[load & 1], (lane & ~3) | (load >> 1));
                low = E2M1_UNIT * e8m0((v >> (j / 2 * 8)) & 255);
                high = E2M1_UNIT * e8m0((v >> (16 + j / 2 * 8)) & 255);
                e2m1(words[j], a);
            } else if constexpr (F == FP8) {
                low = high = __uint_as_float(scales.word[load >> 2]);
                a[0] = e4m3x2(words[2 * j] & 0xFFFF);
                a[1] = e4m3x2(words[2 * j] >> 16);
                a[2] = e4m3x2(words[2 * j + 1] & 0xFFFF);
                a[3] = e4m3x2(words[2 * j + 1] >> 16);
            } else {
                a[0] = words[0];
                a[1] = words[1];
                a[2] = words[2];
                a[3] = words[3];
            }
            const int k = slice * SLICE +
                          (F == NVFP4 ? load * 64 + 16 * t + 4 * j : (load * STEPS + j) * 16 + 4 * t);
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const float scale = r ? high : low;
#pragma unroll
                for (int q = 0; q < 2; ++q) {
                    float2 v;
                    if constexpr (F == BF16) v = open_bf16(a[2 * q + r]);
                    else v = __half22float2(*reinterpret_cast<__half2*>(&a[2 * q + r]));
                    values[r][j % TOGETHER][2 * q] = v.x * scale;
                    values[r][j % TOGETHER][2 * q + 1] = v.y * scale;
                }
            }
            if (j % TOGETHER < TOGETHER - 1) continue;
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const int n = tile * 16 + g + 8 * r;
                const int first = k - 4 * (TOGETHER - 1);
                if (n < s.n && first < s.k)
                    put(out + ((int64_t)h * s.n + n) * s.k + first, values[r], s.k - first);
            }
        }
    }
}

template <typename Out>
__global__ void unpack_kernel(const __grid_constant__ Segment s, Out* y, int64_t bricks) {
    wait_for_prerequisites();
    const int64_t brick = (int64_t)blockIdx.x * (blockDim.x >> 5) + (threadIdx.x >> 5);
    if (brick >= bricks) return;
    const int lane = threadIdx.x & 31;
    switch (s.format) {
        case NVFP4: unpack_brick<NVFP4>(s, brick, y, lane); break;
        case MXFP4: unpack_brick<MXFP4>(s, brick, y, lane); break;
        case FP8: unpack_brick<FP8>(s, brick, y, lane); break;
        case BF16: unpack_brick<BF16>(s, brick, y, lane); break;
    }
}

// What decode.py launches, four warps a block; `s` describes the bank from its first wanted matrix on.
template __global__ void unpack_kernel<float>(const __grid_constant__ Segment, float*, int64_t);
template __global__ void unpack_kernel<__nv_bfloat16>(const __grid_constant__ Segment, __nv_bfloat16*,
                                                      int64_t);
