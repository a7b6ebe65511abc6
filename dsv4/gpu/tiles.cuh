// Decode step and prompts: what a weight in tiles is (tiles.py packs it), and how its codes become numbers.
#pragma once
#include "launch.cuh"

enum { NVFP4 = 0, MXFP4 = 1, FP8 = 2, BF16 = 3 };
constexpr int SLICE = 512;

struct Segment {             // one weight, or a bank of experts, and what it is multiplied with
    const uint4* data;       // [count][units][slices][halves][brick]
    const uint8_t* scale;    // beside it
    const int64_t* places;   // [count] bytes from `data` and `scale` on to each matrix's own; null: one
                             // follows the other
    const float* factor;     // [count][halves]
    const void* x;           // rows of x_stride values
    void* y;                 // rows of y_stride values
    const uint32_t* x_top;   // [rows of x] of a single row that is rounded to NVFP4: its largest magnitude,
                             // float32's bits; null: x is summed at once
    uint32_t* y_top;         // [rows of y] of a single row: grows to that; may be null
    float* carry;   // [rows of y][halves][n], between two passes over K; null: y holds float32 sums itself
    int format, halves, units, slices;
    int first_slice, span;   // those that are summed
    int warps;               // slices of a pass, a warp each
    int n, k;                // true sizes; the tiles are padded with zeros
    int x_stride, y_stride;
    int epilogue;
    int routed;      // 0: rows are the batch. 1: x by token, y by pair. 2: x by pair, y by token and choice
    int how;         // a single row is rounded on the way (round.cuh)
    int per_warp;    // 65536 / warps, rounded up: a product and a shift instead of a division
    int per_group;   // 65536 / groups of so many warps, likewise
};

// A twin on the CPU (tests/kernels) has its own of these.
#ifdef __CUDACC__
__device__ __forceinline__ uint4 stream(const uint4* p) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p));
    return v;
}
// Codes 0 and 255 have one mantissa bit: the subnormal 2^-127, and NaN. (In C++ this takes 16 registers
// more.)
__device__ __forceinline__ float e8m0(uint32_t code) {
    uint32_t bits = code << 23;
    asm("{\n.reg .pred p;\nsetp.eq.u32 p, %1, 0;\nsetp.eq.or.u32 p, %1, 255, p;\n"
        "@p or.b32 %0, %0, 0x00400000;\n}"
        : "+r"(bits)
        : "r"(code));
    return __uint_as_float(bits);
}
__device__ __forceinline__ float2 open_bf16(uint32_t v) {
    return make_float2(__uint_as_float(v << 16), __uint_as_float(v & 0xFFFF0000u));
}
__device__ __forceinline__ uint32_t shared_address(const void* p) {
    return (uint32_t)__cvta_generic_to_shared(p);
}
__device__ __forceinline__ void await(uint32_t barrier, uint32_t parity) {
    asm volatile(
        "{\n.reg .pred p;\nagain:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@!p bra again;\n}" ::"r"(barrier),
        "r"(parity)
        : "memory");
}
__device__ __forceinline__ uint32_t times(uint32_t a, __half2 b) {
    const __half2 v = __hmul2(*reinterpret_cast<__half2*>(&a), b);
    return *reinterpret_cast<const uint32_t*>(&v);
}
// These keep a NaN; fminf and fmaxf would give the other number.
__device__ __forceinline__ float at_most(float v, float limit) {
    float out;
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(out) : "f"(v), "f"(limit));
    return out;
}
__device__ __forceinline__ float at_least(float v, float limit) {
    float out;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(out) : "f"(v), "f"(limit));
    return out;
}
#endif

// Eight E2M1 codes of a word as FP16 pairs, each code's value over E2M1_UNIT. GPUs with an instruction for it
// have a pair in a byte; for others the codes are spread so that numbers fall out by shift and mask (tiles.py
// lays them out for either).
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
constexpr float E2M1_UNIT = 1.f;
__device__ __forceinline__ void e2m1(uint32_t w, uint32_t (&a)[4]) {
    asm("{\n.reg .b8 b0, b1, b2, b3;\nmov.b32 {b0, b1, b2, b3}, %4;\n"
        "cvt.rn.f16x2.e2m1x2 %0, b0;\ncvt.rn.f16x2.e2m1x2 %1, b1;\n"
        "cvt.rn.f16x2.e2m1x2 %2, b2;\ncvt.rn.f16x2.e2m1x2 %3, b3;\n}"
        : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
        : "r"(w));
}
#else
constexpr float E2M1_UNIT = 16384.f;
__device__ __forceinline__ void e2m1(uint32_t w, uint32_t (&a)[4]) {
    a[0] = w & 0x8E008E00u;
    a[1] = (w << 3) & 0x8E008E00u;
    // One product shifts magnitude and sign by different amounts; what else it makes falls to the mask.
    a[2] = (w & 0x40384038u) * (64 + 2) & 0x8E008E00u;
    a[3] = (w & 0x20072007u) * (512 + 4) & 0x8E008E00u;
}
#endif

template <int F> struct Brick {   // bytes of one slice of one tile, in loads of 512
    static constexpr int LOADS = F <= MXFP4 ? 8 : F == FP8 ? 16 : 32;
    static constexpr int SCALE = F == NVFP4 ? 512 : F == MXFP4 ? 256 : F == FP8 ? 16 : 0;
};

template <int F> struct Scales {
    uint32_t word[4];
    __device__ __forceinline__ void load(const uint8_t* p, int lane) {
        if constexpr (F == NVFP4) {
            uint4 v = stream(reinterpret_cast<const uint4*>(p) + lane);
            word[0] = v.x;
            word[1] = v.y;
            word[2] = v.z;
            word[3] = v.w;
        } else if constexpr (F == MXFP4) {
            uint2 v = __ldg(reinterpret_cast<const uint2*>(p) + lane);
            word[0] = v.x;
            word[1] = v.y;
        } else if constexpr (F == FP8) {
            uint4 v = __ldg(reinterpret_cast<const uint4*>(p));
            word[0] = v.x;
            word[1] = v.y;
            word[2] = v.z;
            word[3] = v.w;
        }
    }
    // NVFP4 and FP8 have one word for 128 columns: the next one comes first.
    __device__ __forceinline__ void rotate() {
        if constexpr (F == NVFP4 || F == FP8) {
            word[0] = word[1];
            word[1] = word[2];
            word[2] = word[3];
        }
    }
};

// The power of two that brings `peak` to [2^14, 2^15), FP16's upper end, as the exponent of its inverse.
__device__ __forceinline__ int exponent(float peak) {
    const int e = (__float_as_uint(peak) >> 23) & 255;
    return e == 0 ? 127 : max(e, 15);
}
// That power of two, and what undoes it.
__device__ __forceinline__ float scale_up(int exponent) {
    return __uint_as_float((uint32_t)(268 - exponent) << 23);
}
__device__ __forceinline__ float scale_back(int exponent) {
    return __uint_as_float((uint32_t)(exponent - 14) << 23);
}
