// ops/mhc/prefill_sm90.cu compiled for the CPU.
#include "prompt_twin.h"

inline void mma_bf16(float (&d)[4], const uint32_t (&a)[4], uint2 b) { multiply_bf16(d, a, b.x, b.y); }
inline uint4 read(const __nv_bfloat16* p) { return *(const uint4*)p; }

#include "mhc/prefill_sm90.cu"

LAUNCH(CASE("open_kernel<false>", open_kernel<false>, Opening)
           CASE("open_kernel<true>", open_kernel<true>, Opening)
               CASE("close_kernel<16>", close_kernel<16>, Closing)
                   CASE("close_kernel<32>", close_kernel<32>, Closing))
