// Decode step: what the blocks of a cluster share. A twin on the CPU (tests/kernels/emulator.h) has its own.
#pragma once
#ifdef __CUDACC__
#include "launch.cuh"

__device__ __forceinline__ void* shared_memory() {
    extern __shared__ __align__(128) char memory[];
    return memory;
}
template <typename T> __device__ __forceinline__ T* in_block(T* p, int block) {   // the same place in another block's shared memory
    uint64_t address;
    asm("mapa.u64 %0, %1, %2;" : "=l"(address) : "l"((uint64_t)p), "r"(block));
    return (T*)address;
}
__device__ __forceinline__ void all_started() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
__device__ __forceinline__ void all_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
__device__ __forceinline__ void all_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
#endif
__device__ __forceinline__ void all_sync() {
    __syncwarp();
    all_arrive();
    all_wait();
}
