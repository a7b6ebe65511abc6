// Decode step and prompts: integers of a known size, and of FP16, BF16 and E4M3 what the kernels use. NVRTC
// has no headers, and CUDA's own come with the toolkit. Names and results are those of stdint.h, cuda_fp16.h
// and cuda_bf16.h, but for the last ones.
#pragma once
#ifdef __CUDACC_RTC__
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef int int32_t;
typedef unsigned int uint32_t;
typedef long int64_t;
typedef unsigned long uint64_t, uintptr_t;
#define INFINITY __int_as_float(0x7F800000)
#else
#include <stdint.h>
#endif

struct __align__(2) __nv_bfloat16 {
    uint16_t bits;
};
struct __align__(4) __nv_bfloat162 {
    uint32_t bits;
};   // the first number lies in the low half
struct __align__(4) __half2 {
    uint32_t bits;
};

__device__ __forceinline__ __nv_bfloat16 __float2bfloat16_rn(float v) {
    __nv_bfloat16 r;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(r.bits) : "f"(v));
    return r;
}
__device__ __forceinline__ float __bfloat162float(__nv_bfloat16 v) {
    return __uint_as_float((uint32_t)v.bits << 16);
}
__device__ __forceinline__ __nv_bfloat162 __floats2bfloat162_rn(float low, float high) {
    __nv_bfloat162 r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r.bits) : "f"(high), "f"(low));
    return r;
}

__device__ __forceinline__ __half2 __floats2half2_rn(float low, float high) {
    __half2 r;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r.bits) : "f"(high), "f"(low));
    return r;
}
__device__ __forceinline__ float2 __half22float2(__half2 v) {
    float2 r;
    asm("{\n.reg .f16 low, high;\nmov.b32 {low, high}, %1;\ncvt.f32.f16 %0, low;\n}"
        : "=f"(r.x)
        : "r"(v.bits));
    asm("{\n.reg .f16 low, high;\nmov.b32 {low, high}, %1;\ncvt.f32.f16 %0, high;\n}"
        : "=f"(r.y)
        : "r"(v.bits));
    return r;
}
__device__ __forceinline__ __half2 __hmul2(__half2 a, __half2 b) {
    __half2 r;
    asm("mul.f16x2 %0, %1, %2;" : "=r"(r.bits) : "r"(a.bits), "r"(b.bits));
    return r;
}
__device__ __forceinline__ __half2 __low2half2(__half2 v) {
    __half2 r;
    asm("{\n.reg .f16 low, high;\nmov.b32 {low, high}, %1;\nmov.b32 %0, {low, low};\n}"
        : "=r"(r.bits)
        : "r"(v.bits));
    return r;
}
__device__ __forceinline__ __half2 __high2half2(__half2 v) {
    __half2 r;
    asm("{\n.reg .f16 low, high;\nmov.b32 {low, high}, %1;\nmov.b32 %0, {high, high};\n}"
        : "=r"(r.bits)
        : "r"(v.bits));
    return r;
}

// Two numbers as one word, the first in the low half.
__device__ __forceinline__ uint32_t pack_f16(float low, float high) {
    return __floats2half2_rn(low, high).bits;
}
__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
    return __floats2bfloat162_rn(low, high).bits;
}
// The two values of E4M3 codes, as FP16 holds them.
__device__ __forceinline__ uint32_t e4m3x2(uint16_t codes) {
    uint32_t halves;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(codes));
    return halves;
}
__device__ __forceinline__ float2 e4m3_values(uint16_t codes) {
    return __half22float2(__half2{e4m3x2(codes)});
}
