// Decode step: floats as integers that compare alike.
#pragma once

// Larger floats have larger keys; both zeros have one; NaN's is the largest, whatever its sign, as torch
// sorts.
__device__ __forceinline__ uint32_t order(float v) {
    const uint32_t bits = __float_as_uint(v == 0.f ? 0.f : v);
    return v != v ? ~0u : bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
