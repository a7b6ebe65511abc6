// Launching a kernel that may start while the one before it still runs, and what such a kernel does first.
#pragma once
#include <cuda_runtime.h>

__device__ __forceinline__ void let_next_start() { asm volatile("griddepcontrol.launch_dependents;"); }
// What earlier kernels wrote is there after this. Every kernel of a step calls it, so that "earlier" means all. What may
// be read before: numbers.py.
__device__ __forceinline__ void wait_for_earlier() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

template <typename... Parameters, typename... Arguments>
static int launch(void (*kernel)(Parameters...), int blocks, int threads, int shared_bytes, int cluster, cudaStream_t stream,
                  Arguments... arguments) {
    // As build.py's keep_shared_memory, for the same reason.
    cudaError_t error = cudaFuncSetAttribute((const void*)kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
    if (error == cudaSuccess && shared_bytes > 48 * 1024)
        error = cudaFuncSetAttribute((const void*)kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
    if (error != cudaSuccess) return (int)error;
    cudaLaunchAttribute attributes[2];
    attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[0].val.programmaticStreamSerializationAllowed = 1;
    attributes[1].id = cudaLaunchAttributeClusterDimension;
    attributes[1].val.clusterDim = {(unsigned)cluster, 1, 1};
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(blocks);
    config.blockDim = dim3(threads);
    config.dynamicSmemBytes = shared_bytes;
    config.stream = stream;
    config.attrs = attributes;
    config.numAttrs = cluster > 1 ? 2 : 1;
    return (int)cudaLaunchKernelEx(&config, kernel, arguments...);
}

extern "C" const char* dsv4_error(int code) { return cudaGetErrorString((cudaError_t)code); }
