// Decode step and prompts: what a weight in tiles is (tiles.py packs it), and how its codes become numbers. For matvec.cu and unpack.cu.
#pragma once
#include "launch.cuh"

enum { NVFP4 = 0, MXFP4 = 1, FP8 = 2, BF16 = 3 };
constexpr int SLICE = 512;

struct Segment {            // one weight, or a bank of experts, and what it is multiplied with
    const uint4* data;      // [count][units][slices][halves][brick]
    const uint8_t* scale;   // beside it
    const int64_t* places;  // [count] bytes from `data` and `scale` on to each matrix's own; null: one follows the other
    const float* factor;    // [count][halves]
    const void* x;          // rows of x_stride values
    void* y;                // rows of y_stride values
    float* carry;           // [rows of y][halves][n], between two passes over K; null: y holds float32 sums itself
    int format, halves, units, slices;
    int first_slice, span;  // those that are summed
    int warps;              // slices of a pass, a warp each
    int n, k;               // true sizes; the tiles are padded with zeros
    int x_stride, y_stride;
    int epilogue;
    int routed;             // 0: rows are the batch. 1: x by token, y by pair. 2: x by pair, y by token and choice
};

__device__ __forceinline__ uint4 stream(const uint4* p) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
    return v;
}

// Eight E2M1 codes of a word, spread so that FP16 numbers fall out by shift and mask; each is value * 2^-14.
__device__ __forceinline__ void e2m1(uint32_t w, uint32_t (&a)[4]) {
    a[0] = w & 0x8E008E00u;
    a[1] = (w << 3) & 0x8E008E00u;
    // One product shifts magnitude and sign by different amounts; what else it makes falls to the mask.
    a[2] = (w & 0x40384038u) * (64 + 2) & 0x8E008E00u;
    a[3] = (w & 0x20072007u) * (512 + 4) & 0x8E008E00u;
}

__device__ __forceinline__ uint32_t e4m3x2(uint16_t codes) {
    uint32_t halves;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(codes));
    return halves;
}

__device__ __forceinline__ float2 e4m3_pair(uint32_t word, int high) {
    uint32_t h = e4m3x2((uint16_t)(high ? word >> 16 : word & 0xFFFF));
    return __half22float2(*reinterpret_cast<__half2*>(&h));
}

// Codes 0 and 255 have one mantissa bit: the subnormal 2^-127, and NaN. (In C++ this takes 16 registers more.)
__device__ __forceinline__ float e8m0(uint32_t code) {
    uint32_t bits = code << 23;
    asm("{\n.reg .pred p;\nsetp.eq.u32 p, %1, 0;\nsetp.eq.or.u32 p, %1, 255, p;\n@p or.b32 %0, %0, 0x00400000;\n}"
        : "+r"(bits) : "r"(code));
    return __uint_as_float(bits);
}

template <int F> struct Brick {   // bytes of one slice of one tile, in loads of 512
    static constexpr int LOADS = F <= MXFP4 ? 8 : F == FP8 ? 16 : 32;
    static constexpr int SCALE = F == NVFP4 ? 512 : F == MXFP4 ? 256 : F == FP8 ? 16 : 0;
};

template <int F> struct Scales {
    uint32_t word[4];
    __device__ __forceinline__ void load(const uint8_t* p, int lane) {
        if constexpr (F == NVFP4) {
            uint4 v = stream(reinterpret_cast<const uint4*>(p) + lane);
            word[0] = v.x; word[1] = v.y; word[2] = v.z; word[3] = v.w;
        } else if constexpr (F == MXFP4) {
            uint2 v = __ldg(reinterpret_cast<const uint2*>(p) + lane);
            word[0] = v.x; word[1] = v.y;
        } else if constexpr (F == FP8) {
            uint4 v = __ldg(reinterpret_cast<const uint4*>(p));
            word[0] = v.x; word[1] = v.y; word[2] = v.z; word[3] = v.w;
        }
    }
};

__device__ __forceinline__ float2 open_bf16(uint32_t v) {
    return make_float2(__uint_as_float(v << 16), __uint_as_float(v & 0xFFFF0000u));
}
