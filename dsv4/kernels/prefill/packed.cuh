// Prompts: how rows of x lie in memory for the products (product.cuh): by eight, so that 16 bytes of each follow each other.
#pragma once
#include "round.cuh"
#include "tiles.cuh"

constexpr int ROW_GROUP = 16;
// As product_16.cuh has it: eight rows over 128 columns and eight floats; two of these side by side.
constexpr int EIGHT_BYTES = 2048, EIGHT_STRIDE = EIGHT_BYTES + 32, GROUP_STRIDE = 2 * EIGHT_STRIDE, BLOCKS_K = 4;
// As product_8.cuh has it: eight rows over 256 columns, and a float for each row and 128 columns, their scale times 2^-24.
constexpr int COLUMNS_8 = 256, STRIDE_8 = 2048 + 64, GROUP_STRIDE_8 = 2 * STRIDE_8, BLOCKS_8 = SLICE / COLUMNS_8;

// Where the eight rows are of which `row` is one, from a slice on (16 bits), or from 256 columns on.
__device__ __forceinline__ size_t at_16(int row, int slices, int slice) {
    return ((size_t)(row / ROW_GROUP) * slices + slice) * (BLOCKS_K * GROUP_STRIDE) + row / 8 % 2 * EIGHT_STRIDE;
}
__device__ __forceinline__ size_t at_8(int row, int parts, int part) {
    return ((size_t)(row / ROW_GROUP) * parts + part) * GROUP_STRIDE_8 + row / 8 % 2 * STRIDE_8;
}

// 128 columns of a row in FP8, bit for bit as round.cuh's round_a8 has them. `peaks`: two of their magnitudes, BF16, of which the
// larger is the largest (of BF16 without signs the larger is the larger integer, NaN above all).
struct Codes8 {
    float inverse, scale;   // a NaN makes its row NaN
    bool is_finite;         // else infinity may be among them
    __device__ __forceinline__ explicit Codes8(uint32_t peaks) {
        const uint32_t top = larger(peaks, peaks >> 16) << 16, code = scale_a8(top);
        inverse = __uint_as_float((254u - code) << 23);
        is_finite = top < 0x7F7F0000u;
        scale = top > 0x7F800000u ? __uint_as_float(0x7FC00000u) : __uint_as_float((code - 24) << 23);
    }
    __device__ __forceinline__ uint2 of(uint4 w) const {
        const uint32_t words[4] = {w.x, w.y, w.z, w.w};
        uint32_t codes[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            float2 two = open_bf16(words[j]);
            if (!is_finite) two = make_float2(finite(two.x), finite(two.y));
            codes[j] = e4m3_codes(two.x * inverse, two.y * inverse);
        }
        return make_uint2(codes[0] | codes[1] << 16, codes[2] | codes[3] << 16);
    }
};
__device__ __forceinline__ uint32_t peaks_of(uint4 w) {
    return larger(larger(w.x & 0x7FFF7FFF, w.y & 0x7FFF7FFF), larger(w.z & 0x7FFF7FFF, w.w & 0x7FFF7FFF));
}
