// Prompts: how rows of x lie in memory for the products (prefill_sm90.cuh), in the order of the tensor core.
#pragma once
#include "round.cuh"
#include "tiles.cuh"

constexpr int ROW_GROUP = 16;
// As prefill_sm90_16.cuh has it. Of a slice, sixteen rows are [128 columns][eight rows][64 columns][row][128
// bytes], swizzled as the tensor core has it, so that whoever makes a row writes whole sectors; then a float
// for each row, which undoes its scaling.
constexpr int ATOM_16 = 1024, EIGHT_16 = 2 * ATOM_16, BLOCK_16 = 2 * EIGHT_16,
              UNDO_16 = SLICE / 128 * BLOCK_16, SLICE_16 = UNDO_16 + 128;
// How numbers are held, and the columns that mix: of so many, pair p is word p / 2 of chunk p % 2, or word p
// / 8 of chunk p % 8.
enum { FP16_BY_64 = 0, FP16_BY_16 = 1, BF16_BY_16 = 2 };
// As prefill_sm90_8.cuh has it: eight rows over 256 columns, and a float for each row and 128 columns, their
// scale times 2^-24.
constexpr int COLUMNS_8 = 256, STRIDE_8 = 2048 + 64, GROUP_STRIDE_8 = 2 * STRIDE_8,
              BLOCKS_8 = SLICE / COLUMNS_8;

// Where a slice of a row's group is; there, the row's chunk of 16 bytes, one of 64.
__device__ __forceinline__ size_t at_16(int row, int slices, int slice) {
    return ((size_t)(row / ROW_GROUP) * slices + slice) * SLICE_16;
}
__device__ __forceinline__ int chunk_16(int row, int chunk) {
    return chunk / 16 * BLOCK_16 + row / 8 % 2 * EIGHT_16 + chunk / 8 % 2 * ATOM_16 + row % 8 * 128 +
           ((chunk ^ row) & 7) * 16;
}
__device__ __forceinline__ int undo_16(int row) { return UNDO_16 + row % ROW_GROUP * 4; }
// What brings a row's slice to FP16's upper end, and back. `peaks`: as for Codes8; a NaN makes its row NaN,
// whatever the scale.
struct Scale16 {
    float up, undo;
    __device__ __forceinline__ explicit Scale16(uint32_t peaks) {
        const int e = exponent(__uint_as_float(larger(peaks, peaks >> 16) << 16));
        up = scale_up(e);
        undo = scale_back(e);
    }
    __device__ __forceinline__ uint32_t of(uint32_t pair) const {
        const float2 v = open_bf16(pair);
        return pack_f16(v.x * up, v.y * up);
    }
};
// Sixteen columns that two lanes have, eight each: as chunks, the even lane's is the first.
__device__ __forceinline__ uint4 chunk_of_two(uint4 w, bool is_odd) {
    const uint32_t x = __shfl_xor_sync(~0u, is_odd ? w.x : w.y, 1),
                   z = __shfl_xor_sync(~0u, is_odd ? w.z : w.w, 1);
    return is_odd ? make_uint4(x, z, w.y, w.w) : make_uint4(w.x, w.z, x, z);
}

// Where the eight rows are of which `row` is one, from 256 columns on, in FP8.
__device__ __forceinline__ size_t at_8(int row, int parts, int part) {
    return ((size_t)(row / ROW_GROUP) * parts + part) * GROUP_STRIDE_8 + row / 8 % 2 * STRIDE_8;
}

// 128 columns of a row in FP8, bit for bit as round.cuh's round_a8 has them. `peaks`: two of their
// magnitudes, BF16, of which the larger is the largest (of BF16 without signs the larger is the larger
// integer, NaN above all).
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
