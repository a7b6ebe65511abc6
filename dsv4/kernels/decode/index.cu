// Decode step: the index of a CSA layer, in V4's sizes and BF16: its queries, rotated, transformed and rounded. To the bit what prepare.py does in
// Triton for any size, in a fifth of the instructions.
//
// A launch finds its instructions in no cache, and these run once. So with `warms` a kernel runs once before its wait, on zeros.
#include "cluster.cuh"
#include "fragments.cuh"
#include "round.cuh"

constexpr int HEADS = 64, WIDTH = 128, ROPE = 64, WARPS = 4;
constexpr float SHARE = 0.08838834764831845f;   // 128^-0.5

struct Queries {
    __nv_bfloat16* q;           // [rows][HEADS][WIDTH]
    const float *cos, *sin;     // [positions][ROPE / 2]
    const int64_t* positions;   // [rows]
    int warms;
};

// A warp has a head, a lane four channels. Sums of the transform by channel bit, the lowest first. Triggers late, as in prepare.py.
__global__ void __launch_bounds__(WARPS * 32) queries_kernel(const Queries p) {
    const int head = blockIdx.x * WARPS + (threadIdx.x >> 5), lane = threadIdx.x & 31;   // of all rows
    float2 c = make_float2(1.f, 1.f), s = make_float2(0.f, 0.f);
    if (lane >= (WIDTH - ROPE) / 4) {
        const int64_t angle = max((int)__ldcg(p.positions + head / HEADS), 0) * (int64_t)(ROPE / 2) + 2 * lane - (WIDTH - ROPE) / 2;
        c = __ldg(reinterpret_cast<const float2*>(p.cos + angle));
        s = __ldg(reinterpret_cast<const float2*>(p.sin + angle));
    }
    uint2* at = reinterpret_cast<uint2*>(p.q + (int64_t)head * WIDTH) + lane;
    uint2 v = make_uint2(0, 0);
    bool is_real = !p.warms;
#pragma unroll 1
    for (;; is_real = true) {
        if (is_real) {
            wait_for_prerequisites();
            launch_dependents();
            v = __ldcg(at);
        }
        const float2 a = open_bf16(v.x), b = open_bf16(v.y);
        const float2 low = open_bf16(bf16_pair(__fmaf_rn(a.x, c.x, -__fmul_rn(a.y, s.x)), __fmaf_rn(a.x, s.x, __fmul_rn(a.y, c.x))));
        const float2 high = open_bf16(bf16_pair(__fmaf_rn(b.x, c.y, -__fmul_rn(b.y, s.y)), __fmaf_rn(b.x, s.y, __fmul_rn(b.y, c.y))));
        const float sums[4] = {low.x + low.y, low.x - low.y, high.x + high.y, high.x - high.y};
        float x[4] = {sums[0] + sums[2], sums[1] + sums[3], sums[0] - sums[2], sums[1] - sums[3]};
#pragma unroll
        for (int bit = 1; bit < 32; bit <<= 1) {
            const float sign = lane & bit ? -1.f : 1.f;
#pragma unroll
            for (int i = 0; i < 4; ++i) x[i] = __fmaf_rn(sign, x[i], __shfl_xor_sync(~0u, x[i], bit));
        }
        const uint32_t words[2] = {bf16_pair(x[0] * SHARE, x[1] * SHARE), bf16_pair(x[2] * SHARE, x[3] * SHARE)};
        const uint32_t top = over<8>(largest(words)), code = (__float_as_uint(fmaxf(finite_top(top), 6.f * 0x1p-126f) * (1.f / 6.f)) + 0x7FFFFFu) >> 23;
        const float unit = __uint_as_float(top > INF ? 0x7FC00000u : code << 23), inverse = __uint_as_float((254u - code) << 23);
        uint32_t rounded[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float2 two = open_bf16(words[i]);
            rounded[i] = bf16_pair(e2m1_round(finite(two.x) * inverse) * unit, e2m1_round(finite(two.y) * inverse) * unit);
        }
        if (is_real) {
            *at = make_uint2(rounded[0], rounded[1]);
            return;
        }
    }
}
