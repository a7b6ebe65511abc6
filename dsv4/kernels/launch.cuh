// Programmatic dependent launch (PDL): with `overlap` a kernel may start while the one before it still runs.
#pragma once
#include <cuda_runtime.h>

// The next kernel may start when every block of this one has come here, or has exited.
__device__ __forceinline__ void launch_dependents() { asm volatile("griddepcontrol.launch_dependents;"); }
// After this the launches before this one are complete and what they wrote is visible. Every kernel of a step executes
// it. What each reads before is declared with its launcher (overlap.py) and read from L2 if a step writes it: until the
// wait, a line of an earlier kernel may lie in L1.
__device__ __forceinline__ void wait_for_prerequisites() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

template <typename... Parameters, typename... Arguments>
static int launch(void (*kernel)(Parameters...), int blocks, int threads, int shared_bytes, int cluster, int overlap,
                  cudaStream_t stream, Arguments... arguments) {
    // As build.py's keep_shared_memory, for the same reason.
    cudaError_t error = cudaFuncSetAttribute((const void*)kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
    if (error == cudaSuccess && shared_bytes > 48 * 1024)
        error = cudaFuncSetAttribute((const void*)kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
    if (error != cudaSuccess) return (int)error;
    cudaLaunchAttribute attributes[2];
    int count = 0;
    if (overlap) {
        attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
        attributes[count++].val.programmaticStreamSerializationAllowed = 1;
    }
    if (cluster > 1) {
        attributes[count].id = cudaLaunchAttributeClusterDimension;
        attributes[count++].val.clusterDim = {(unsigned)cluster, 1, 1};
    }
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(blocks);
    config.blockDim = dim3(threads);
    config.dynamicSmemBytes = shared_bytes;
    config.stream = stream;
    config.attrs = attributes;
    config.numAttrs = count;
    return (int)cudaLaunchKernelEx(&config, kernel, arguments...);
}

extern "C" const char* dsv4_error(int code) { return cudaGetErrorString((cudaError_t)code); }
