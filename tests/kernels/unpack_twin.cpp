// ops/linear/prefill_unpack.cu compiled for the CPU.
#include "prompt_twin.h"

struct __nv_bfloat162 {
    uint32_t bits;
};
inline __nv_bfloat162 __floats2bfloat162_rn(float low, float high) { return {pack_bf16(low, high)}; }

#include "linear/prefill_unpack.cu"

// Its three arguments.
struct Unpacking {
    Segment segment;
    void* y;
    int64_t bricks;
};
template <typename Out> void unpack(const Unpacking& p) {
    unpack_kernel<Out>(p.segment, (Out*)p.y, p.bricks);
}

LAUNCH(CASE("unpack_kernel<float>", unpack<float>, Unpacking)
           CASE("unpack_kernel<__nv_bfloat16>", unpack<__nv_bfloat16>, Unpacking))
