// Decode step and prompts: RoPE of two neighbouring channels in BF16, rounded as a product and a
// multiply-add. (attention/decode.cu has it among its own.)
#pragma once
#ifdef __CUDACC__   // a twin on the CPU (tests/kernels) has its own
#include "tiles.cuh"
#endif

__device__ __forceinline__ uint32_t rotated(uint32_t pair, float cos, float sin) {
    const float2 v = open_bf16(pair);
    return pack_bf16(__fmaf_rn(v.x, cos, -__fmul_rn(v.y, sin)), __fmaf_rn(v.x, sin, __fmul_rn(v.y, cos)));
}
