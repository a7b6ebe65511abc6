// Decode step: tensor core products of one warp, and copies to shared memory. A twin on the CPU
// (tests/kernels) has its own of each.
//
// Fragments of m16n8k16, by lane = 4 g + t: A has rows g and g + 8, columns 2t, 2t + 1 (words 0, 1) and 8
// more (2, 3); B the column g and rows 2t, 2t + 1, then 8 more; D rows g (0, 1) and g + 8 (2, 3), columns 2t
// and 2t + 1.
#pragma once
#ifdef __CUDACC__
#include "tiles.cuh"

__device__ __forceinline__ void multiply_f16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                             uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void multiply_bf16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                              uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// Four 8x8 matrices of 16-bit numbers, lane 8 i + j with the address of row j of matrix i; each comes
// transposed: this lane has rows 2t and 2t + 1 of column g.
__device__ __forceinline__ void load_transposed(uint32_t (&r)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(row))
                 : "memory");
}
// Two of them.
__device__ __forceinline__ void load_transposed(uint32_t (&r)[2], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];"
                 : "=r"(r[0]), "=r"(r[1])
                 : "r"(shared_address(row))
                 : "memory");
}
// The first `bytes` of 16, past L1, or of 8; then zeros.
template <int BYTES> __device__ __forceinline__ void copy_some(uint32_t to, const void* from, int bytes) {
    if constexpr (BYTES == 16)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes)
                     : "memory");
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(to), "l"(from), "r"(bytes)
                     : "memory");
}
__device__ __forceinline__ void copy16(void* to, const void* from, bool is_there) {
    copy_some<16>(shared_address(to), from, is_there ? 16 : 0);
}
__device__ __forceinline__ void await_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }
// Of both halves, in BF16; what underflows stays.
__device__ __forceinline__ uint32_t times_bf16(uint32_t a, uint32_t b) {
    uint32_t out;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
    return out;
}
__device__ __forceinline__ float at_least_0(float x) {   // NaN stays
    float y;
    asm("max.NaN.f32 %0, %1, 0f00000000;" : "=f"(y) : "f"(x));
    return y;
}
__device__ __forceinline__ float power_of_two(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ __forceinline__ float reciprocal(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
#endif
