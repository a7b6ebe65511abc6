// Bench: reads memory and does nothing else: the speed that every other kernel is held against.
#include "tiles.cuh"

__device__ __forceinline__ uint32_t words(const uint4& v) { return v.x + v.y + v.z + v.w; }

// Adds all 32-bit words into `sum`, FLIGHT loads of 16 bytes per thread under way at a time. The sum is the
// same in any order, so it can be checked, and no load can be left out.
template <int FLIGHT>
__global__ void __launch_bounds__(512) read_kernel(const uint4* data, int64_t count, uint32_t* sum) {
    const int64_t stride = (int64_t)gridDim.x * blockDim.x;
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    uint32_t total = 0;
    for (; i + (FLIGHT - 1) * stride < count; i += FLIGHT * stride) {
        uint4 v[FLIGHT];
#pragma unroll
        for (int j = 0; j < FLIGHT; ++j) v[j] = stream(data + i + j * stride);
#pragma unroll
        for (int j = 0; j < FLIGHT; ++j) total += words(v[j]);
    }
    for (; i < count; i += stride) total += words(stream(data + i));
    for (int step = 16; step; step >>= 1) total += __shfl_xor_sync(~0u, total, step);
    if ((threadIdx.x & 31) == 0) atomicAdd(sum, total);
}

// What ceiling.py launches; `count` loads of 16 bytes.
template __global__ void read_kernel<4>(const uint4*, int64_t, uint32_t*);
template __global__ void read_kernel<8>(const uint4*, int64_t, uint32_t*);
