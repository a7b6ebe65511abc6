// Prompts: Hopper's asynchronous product of a warpgroup: D [64, N] += A [64, 32 bytes] B [32 bytes, N], A in
// registers, B in shared memory.
#pragma once
#ifdef __CUDACC__
#include "types.cuh"
#endif

// B as core matrices of 8 columns times 16 bytes, 128 bytes each, without swizzle: the two of a product
// follow each other, the next eight columns' lie `stride` bytes on.
__device__ __forceinline__ uint64_t wgmma_matrix(uint32_t address, int stride) {
    return (uint64_t)((address & 0x3FFFF) >> 4) | (uint64_t)(128 >> 4) << 16 | (uint64_t)(stride >> 4) << 32;
}

// Rows of 128 bytes, swizzled, eight in 1,024 bytes, the next eight `stride` bytes on. `leading`: bytes
// between 64 columns and the next, where they are the rows of the operand (values).
__device__ __forceinline__ uint64_t swizzled_matrix(uint32_t address, int leading, int stride = 1024) {
    return (uint64_t)((address & 0x3FFFF) >> 4) | (uint64_t)(leading >> 4) << 16 |
           (uint64_t)(stride >> 4) << 32 | 1ull << 62;
}

enum Operands { F16_F16, BF16_BF16, E4M3_E4M3, E5M2_E4M3 };   // of A and B: 16 numbers of 16 bits, or 32 of 8

// A twin on the CPU (tests/kernels) has its own of these.
#ifdef __CUDACC__
// Orders the warp's writes of registers before the products that read them, or add to them.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// Until at most `PENDING` of the groups committed are not complete.
template <int PENDING> __device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

#define OUT4(I) "+f"(d[I]), "+f"(d[I + 1]), "+f"(d[I + 2]), "+f"(d[I + 3])
#define OUT8(I) OUT4(I), OUT4(I + 4)
#define WGMMA(SHAPE, TYPES, MORE, D, A, B, ADDS, ...)                                                 \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " ADDS ", 0;\nwgmma.mma_async.sync.aligned." SHAPE \
                 ".f32." TYPES " {" D "}, {" A "}, " B ", p, 1, 1" MORE ";\n}"                        \
                 : __VA_ARGS__                                                                        \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(adds))
// `adds` 0: D is overwritten.
#define PRODUCT(N, D, A, B, ADDS, ...)                                                                       \
    template <Operands T>                                                                                    \
    __device__ __forceinline__ void wgmma(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b, int adds) { \
        if constexpr (T == F16_F16) WGMMA("m64n" #N "k16", "f16.f16", ", 0", D, A, B, ADDS, __VA_ARGS__);    \
        else if constexpr (T == BF16_BF16)                                                                   \
            WGMMA("m64n" #N "k16", "bf16.bf16", ", 0", D, A, B, ADDS, __VA_ARGS__);                          \
        else if constexpr (T == E4M3_E4M3)                                                                   \
            WGMMA("m64n" #N "k32", "e4m3.e4m3", "", D, A, B, ADDS, __VA_ARGS__);                             \
        else WGMMA("m64n" #N "k32", "e5m2.e4m3", "", D, A, B, ADDS, __VA_ARGS__);                            \
    }
#define D8 "%0,%1,%2,%3,%4,%5,%6,%7"
#define D16 D8 ",%8,%9,%10,%11,%12,%13,%14,%15"
#define D32 D16 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define D36 D32 ",%32,%33,%34,%35"
#define D56 D36 ",%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55"
#define D64 D56 ",%56,%57,%58,%59,%60,%61,%62,%63"
PRODUCT(16, D8, "%8,%9,%10,%11", "%12", "%13", OUT8(0))
PRODUCT(32, D16, "%16,%17,%18,%19", "%20", "%21", OUT8(0), OUT8(8))
PRODUCT(64, D32, "%32,%33,%34,%35", "%36", "%37", OUT8(0), OUT8(8), OUT8(16), OUT8(24))
PRODUCT(72, D36, "%36,%37,%38,%39", "%40", "%41", OUT8(0), OUT8(8), OUT8(16), OUT8(24), OUT4(32))
PRODUCT(112, D56, "%56,%57,%58,%59", "%60", "%61", OUT8(0), OUT8(8), OUT8(16), OUT8(24), OUT8(32), OUT8(40),
        OUT8(48))
PRODUCT(128, D64, "%64,%65,%66,%67", "%68", "%69", OUT8(0), OUT8(8), OUT8(16), OUT8(24), OUT8(32), OUT8(40),
        OUT8(48), OUT8(56))
#undef OUT4
#undef OUT8
#undef WGMMA
#undef PRODUCT
#undef D8
#undef D16
#undef D32
#undef D36
#undef D56
#undef D64
#endif
