// Prompts: blocks in which some warps fetch and others multiply: the barriers between them, copies, and
// registers, which change hands.
#pragma once
#include "tiles.cuh"

// A twin on the CPU (tests/kernels) has its own of these.
#ifdef __CUDACC__
// An mbarrier of so many arrivals.
__device__ __forceinline__ void open_barrier(uint32_t barrier, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}
__device__ __forceinline__ void copies_see_barriers() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void arrive(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// An arrival that says how many bytes copies bring.
__device__ __forceinline__ void arrive_expecting(uint32_t barrier, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
                 : "memory");
}
__device__ __forceinline__ void copy_bulk(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
        "l"(from), "r"(bytes), "r"(barrier)
        : "memory");
}
// Of so many threads; 0 is the number of __syncthreads.
template <int NUMBER, int COUNT> __device__ __forceinline__ void some_threads_meet() {
    asm volatile("bar.sync %0, %1;" ::"n"(NUMBER), "n"(COUNT) : "memory");
}
// A warpgroup keeps so many registers of each thread, or takes so many.
template <int COUNT> __device__ __forceinline__ void keep_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}
template <int COUNT> __device__ __forceinline__ void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}
#endif
