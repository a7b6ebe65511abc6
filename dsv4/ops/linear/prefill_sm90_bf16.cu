// Prompts: prefill_sm90_16.cuh with BF16 weights. A source of its own, so that formats compile side by side.
#include "prefill_sm90_16.cuh"

template __global__ void product_kernel<BF16, false>(const __grid_constant__ Product);
template __global__ void product_kernel<BF16, true>(const __grid_constant__ Product);
