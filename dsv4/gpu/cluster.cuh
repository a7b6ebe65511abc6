// Decode step: what the blocks of a cluster share. A twin on the CPU (tests/kernels/emulator.h) has its own.
#pragma once
#ifdef __CUDACC__
#include "launch.cuh"

__device__ __forceinline__ void* shared_memory() {
    extern __shared__ __align__(128) char memory[];
    return memory;
}
template <typename T>
__device__ __forceinline__ T* in_block(T* p, int block) {   // the same place in another block's shared memory
    uint64_t address;
    asm("mapa.u64 %0, %1, %2;" : "=l"(address) : "l"((uint64_t)p), "r"(block));
    return (T*)address;
}
__device__ __forceinline__ void all_started() {
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ __forceinline__ void all_arrive() {
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
// An inbox is full when it has so many bytes, sent from anywhere in the cluster once every block has opened
// its own: a barrier that all blocks arrive at after that, and wait at before they send, says so. Used once
// in a launch. Unlike a barrier that releases what was stored, sending does not wait for memory.
typedef uint64_t Inbox;
__device__ __forceinline__ void open_inbox(Inbox* inbox, int bytes) {   // one thread
    const uint32_t at = (uint32_t)__cvta_generic_to_shared(inbox);
    asm volatile(
        "mbarrier.init.shared::cta.b64 [%0], 1;\nfence.mbarrier_init.release.cluster;\n"
        "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(at),
        "r"(bytes)
        : "memory");
}
__device__ __forceinline__ uint32_t address_in(const void* p, int block) {
    uint32_t address;
    asm("mapa.shared::cluster.u32 %0, %1, %2;"
        : "=r"(address)
        : "r"((uint32_t)__cvta_generic_to_shared(p)), "r"(block));
    return address;
}
__device__ __forceinline__ void send(const void* to, uint32_t v, int block, const Inbox* inbox) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(
                     address_in(to, block)),
                 "r"(v), "r"(address_in(inbox, block))
                 : "memory");
}
__device__ __forceinline__ void send(const void* to, uint2 v, int block, const Inbox* inbox) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [%0], {%1, %2}, [%3];" ::"r"(
                     address_in(to, block)),
                 "r"(v.x), "r"(v.y), "r"(address_in(inbox, block))
                 : "memory");
}
// So many bytes of this block's shared memory, which stay as they are until they have arrived.
__device__ __forceinline__ void send_from(const void* to, const void* from, int bytes, int block,
                                          const Inbox* inbox) {
    asm volatile(
        "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
            address_in(to, block)),
        "r"((uint32_t)__cvta_generic_to_shared(from)), "r"(bytes), "r"(address_in(inbox, block))
        : "memory");
}
// What this thread read or wrote in shared memory comes before copies to or from there that others start
// after a barrier.
__device__ __forceinline__ void copies_may_follow() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
__device__ __forceinline__ void await_inbox(const Inbox* inbox) {
    asm volatile(
        "{\n.reg .pred p;\nagain:\n"
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%0], 0;\n@!p bra again;\n}" ::"r"(
            (uint32_t)__cvta_generic_to_shared(inbox))
        : "memory");
}
__device__ __forceinline__ void all_wait() {
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
#endif
__device__ __forceinline__ void all_sync() {
    __syncwarp();
    all_arrive();
    all_wait();
}
