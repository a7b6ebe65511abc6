// Prompts: prefill_sm90_8.cuh with MXFP4 weights. A source of its own, so that formats compile side by side.
#include "prefill_sm90_8.cuh"

template __global__ void product_kernel<MXFP4, false>(const __grid_constant__ Product);
template __global__ void product_kernel<MXFP4, true>(const __grid_constant__ Product);
