// Prompts: queries of the index: rotated, transformed by Hadamard's matrix, rounded to MXFP4 and back, in one
// pass.
#include "rope.cuh"
#include "round.cuh"

constexpr int WIDTH = 128, ROPE = 64,
              OWN =
                  32;   // channels of a row, those that turn (the last ones), and of a lane: a block of MXFP4
constexpr float SHARE = 0.08838834764831845f;   // 128^-0.5

struct Queries {
    const __nv_bfloat16* q;   // [rows][WIDTH]
    const float *cos, *sin;   // [rows / heads][ROPE / 2]
    __nv_bfloat16* out;       // as q
    int rows, heads;
};

// Four lanes have a row. As codec.py and ops/index/cpu.py have it: the transform's sums by channel bit, the
// lowest first.
__global__ void __launch_bounds__(128) queries_kernel(const __grid_constant__ Queries p) {
    wait_for_prerequisites();
    const int lane = threadIdx.x & 31, part = lane & 3,
              row = blockIdx.x * 32 + (threadIdx.x >> 5) * 8 + (lane >> 2), given = min(row, p.rows - 1);
    const uint4* from = reinterpret_cast<const uint4*>(p.q + (int64_t)given * WIDTH + part * OWN);
    uint32_t words[OWN / 2];
#pragma unroll
    for (int i = 0; i < OWN / 8; ++i) {
        const uint4 v = __ldcg(from + i);
        words[4 * i] = v.x;
        words[4 * i + 1] = v.y;
        words[4 * i + 2] = v.z;
        words[4 * i + 3] = v.w;
    }
    if (part * OWN >= WIDTH - ROPE) {
        const int64_t angle = (int64_t)(given / p.heads) * (ROPE / 2) + (part * OWN - (WIDTH - ROPE)) / 2;
#pragma unroll
        for (int i = 0; i < OWN / 8; ++i) {
            const float4 c = __ldcg(reinterpret_cast<const float4*>(p.cos + angle) + i),
                         s = __ldcg(reinterpret_cast<const float4*>(p.sin + angle) + i);
            const float cosines[4] = {c.x, c.y, c.z, c.w}, sines[4] = {s.x, s.y, s.z, s.w};
#pragma unroll
            for (int k = 0; k < 4; ++k) words[4 * i + k] = rotated(words[4 * i + k], cosines[k], sines[k]);
        }
    }
    float v[OWN];
#pragma unroll
    for (int i = 0; i < OWN / 2; ++i) {
        const float2 two = open_bf16(words[i]);
        v[2 * i] = two.x;
        v[2 * i + 1] = two.y;
    }
#pragma unroll
    for (int bit = 1; bit < OWN; bit <<= 1)
#pragma unroll
        for (int i = 0; i < OWN; ++i)
            if (!(i & bit)) {
                const float a = v[i], b = v[i | bit];
                v[i] = a + b;
                v[i | bit] = a - b;
            }
#pragma unroll
    for (int bit = 1; bit < WIDTH / OWN; bit <<= 1)
#pragma unroll
        for (int i = 0; i < OWN; ++i) {
            const float other = __shfl_xor_sync(~0u, v[i], bit);
            v[i] = part & bit ? other - v[i] : v[i] + other;
        }
#pragma unroll
    for (int i = 0; i < OWN / 2; ++i) words[i] = pack_bf16(v[2 * i] * SHARE, v[2 * i + 1] * SHARE);
    const uint32_t top = largest(words);
    const Scale4 by(top);
#pragma unroll
    for (int i = 0; i < OWN / 2; ++i) {
        float2 two = open_bf16(words[i]);
        if (top >= INF) two = make_float2(finite(two.x), finite(two.y));
        words[i] = pack_bf16(e2m1_round(two.x * by.inverse) * by.unit,
                             e2m1_round(two.y * by.inverse) * by.unit);
    }
    if (row >= p.rows) return;
    uint4* to = reinterpret_cast<uint4*>(p.out + (int64_t)row * WIDTH + part * OWN);
#pragma unroll
    for (int i = 0; i < OWN / 8; ++i)
        to[i] = make_uint4(words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3]);
}
