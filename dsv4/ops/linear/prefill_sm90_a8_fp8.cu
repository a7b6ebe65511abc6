// Prompts: prefill_sm90_8.cuh with FP8 weights. A source of its own, so that formats compile side by side.
#include "prefill_sm90_8.cuh"

template __global__ void product_kernel<FP8, false>(const __grid_constant__ Product);
template __global__ void product_kernel<FP8, true>(const __grid_constant__ Product);
