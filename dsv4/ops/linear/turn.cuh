// Decode step: the turns of a block of matvec.cu. Each warp multiplies two bricks with its slice of x; then
// one warp per column adds up the slices.
#pragma once
#include "weights.cuh"

// Bricks whose products a warp interleaves.
template <int F, typename At> constexpr int AT_ONCE = At::SINGLE && F == NVFP4 && !At::IS_WIDE ? 2 : 1;

// A brick as one chain of products, chunk by chunk. `take_chunk`: where this lane's part of the next chunk
// lies, when it is there.
template <int F, typename At, typename Take, typename Fetch>
__device__ __forceinline__ void multiply_brick(float (&sum)[1][4], const uint2* x, Scales<F> (&scales)[1],
                                               int lane, const Take& take_chunk, const Fetch& fetch_next) {
    constexpr int CHUNK_LOADS = At::CHUNK / 512, CHUNKS = Brick<F>::LOADS / CHUNK_LOADS;
    constexpr bool ROLLS = At::SINGLE && F >= FP8;
    float block[4] = {};
#pragma unroll(ROLLS ? 1 : CHUNKS)
    for (int chunk = 0; chunk < CHUNKS; ++chunk) {
        const uint4* w = take_chunk();
        const uint2* its_x = x + (ROLLS ? chunk * (ITEMS / CHUNKS) : 0);
#pragma unroll
        for (int i = 0; i < CHUNK_LOADS; ++i) {
            const int load = ROLLS ? i : chunk * CHUNK_LOADS + i;
            if constexpr (F == NVFP4) multiply_nvfp4<1>({w[i * 32]}, load, its_x, scales, sum);
            else multiply<F>(w[i * 32], load, its_x, scales[0], lane, sum[0], block);
        }
        if constexpr (ROLLS && F == FP8)   // two words of scales are used up
            for (int i = 0; i < CHUNK_LOADS / 4; ++i) scales[0].rotate();
        __syncwarp();
        fetch_next();
    }
}

// A warp's sums of a brick to [column][row], with what undoes the scaling of its two columns of x.
template <typename At>
__device__ __forceinline__ void put_sum(float* table, int brick, const float (&sum)[4], float undo0,
                                        float undo1, int g, int t) {
    float* out = table + brick * At::SUMS + g;
    if (2 * t < At::HELD) {
        out[(2 * t) * 16] = sum[0] * undo0;
        out[(2 * t) * 16 + 8] = sum[2] * undo0;
    }
    if (2 * t + 1 < At::HELD) {
        out[(2 * t + 1) * 16] = sum[1] * undo1;
        out[(2 * t + 1) * 16 + 8] = sum[3] * undo1;
    }
}

// The slices' sums of column c, in their order, added to `total`.
template <int F, typename At, bool IS_F32>
__device__ __forceinline__ float add_slices(float total, const float* in, int c, int slices) {
#pragma unroll
    for (int w = 0; w < MAX_SLICES; ++w)
        if (w < slices) {
            float whole = 0.f;
            if constexpr (IS_F32)
                for (int q = (F == BF16 ? 2 : 1); q >= 0; --q)
                    whole += in[w * 2 * At::SUMS + (c * PARTS + q) * 16];
            else whole = in[w * 2 * At::SUMS + c * 16];
            total += whole;
        }
    return total;
}

// A finished sum, as y holds it; of a pair SwiGLU, times the routing weight that lane c has. By all lanes.
template <bool IS_F32>
__device__ __forceinline__ void put_result(const Params& p, const Segment& s, float v, float routing, int c,
                                           size_t y_at, const Lane& to, bool paired, bool inside) {
    if (paired) {
        const float weight = __shfl_sync(~0u, routing, c);
        const float gate = at_most(as_act<IS_F32>(v), p.limit);
        const float up = at_least(at_most(as_act<IS_F32>(__shfl_down_sync(~0u, v, 16)), p.limit), -p.limit);
        float hidden = gate / (1.f + expf(-gate)) * up;
        if (s.routed) hidden *= weight;
        if (to.h == 0 && inside) put_act<IS_F32>(s.y, y_at, hidden);
    } else if (inside) {
        if (s.epilogue == AS_F32) static_cast<float*>(s.y)[y_at] = v;
        else put_act<IS_F32>(s.y, y_at, v);
    }
}

// All chunks of two NVFP4 bricks, or of one.
template <int CHUNK_LOADS>
__device__ __forceinline__ void multiply_two(float (&sums)[2][4], const uint4* first, const uint4* other,
                                             const uint2* x, Scales<NVFP4> (&scales)[2]) {
#pragma unroll 2   // the instruction cache is cold at a single row's launch, so loops stay loops
    for (int i = 0; i < CHUNK_LOADS; i += 2) {   // a word of scales
        multiply_nvfp4<2>({first[i * 32], other[i * 32]}, 0, x + i * 16, scales, sums);
        multiply_nvfp4<2>({first[i * 32 + 32], other[i * 32 + 32]}, 1, x + i * 16, scales, sums);
        scales[0].rotate();
        scales[1].rotate();
    }
}
template <int CHUNK_LOADS>
__device__ __forceinline__ void multiply_one(float (&sums)[1][4], const uint4* first, const uint2* x,
                                             Scales<NVFP4>& scales) {
#pragma unroll 2
    for (int i = 0; i < CHUNK_LOADS; i += 2) {
        multiply_nvfp4<1>({first[i * 32]}, 0, x + i * 16, {scales}, sums);
        multiply_nvfp4<1>({first[i * 32 + 32]}, 1, x + i * 16, {scales}, sums);
        scales.rotate();
    }
}

// A single row's turn in NVFP4. A brick's sum is one chain of products, each waiting for the one before, so
// two bricks are multiplied at a time. (A batch has twice as many warps to keep the tensor core busy, and
// fetches a brick's stage anew while it multiplies the other.) Scales: the second brick's lie `second` bytes
// after the first's, the next turn's `turn_bytes` after this one's.
template <typename At, typename Fetch, typename Take>
__device__ __forceinline__ void multiply_pair(Scales<NVFP4> (&now)[2], const uint8_t*& scale, size_t second,
                                              size_t turn_bytes, bool has_second, bool has_next,
                                              bool has_next_second, float* table, const uint2* x, float undo0,
                                              int warp, int lane, int g, int t, const Fetch& fetch_next,
                                              const Take& take_chunk) {
    constexpr int CHUNK_LOADS = At::CHUNK / 512;
    static_assert(CHUNK_LOADS == Brick<NVFP4>::LOADS);
    scale += turn_bytes;
    Scales<NVFP4> next[2] = {now[0], now[1]};
    if (has_next) next[0].load(scale, lane);
    if (has_next_second) next[1].load(scale + second, lane);
    const uint4* first = take_chunk();
    if (has_second) {
        const uint4* other = take_chunk();
        float sums[2][4] = {};
        multiply_two<CHUNK_LOADS>(sums, first, other, x, now);
        __syncwarp();
        fetch_next();
        fetch_next();
        put_sum<At>(table, warp * 2, sums[0], undo0, 1.f, g, t);
        put_sum<At>(table, warp * 2 + 1, sums[1], undo0, 1.f, g, t);
    } else {
        float sums[1][4] = {};
        multiply_one<CHUNK_LOADS>(sums, first, x, now[0]);
        __syncwarp();
        fetch_next();
        put_sum<At>(table, warp * 2, sums[0], undo0, 1.f, g, t);
    }
    now[0] = next[0];
    now[1] = next[1];
}

// Which row of y it is.
template <typename At> __device__ __forceinline__ size_t row_of_y(const Params& p, const Segment& s, int at) {
    return !At::SINGLE && s.routed == 2 ? (size_t)(at / p.choices) * (p.choices + 1) + at % p.choices
                                        : (size_t)at;
}
// Where a sum lies between two passes: in y, if that holds float32 sums.
template <typename At>
__device__ __forceinline__ float* carry_of(const Params& p, const Segment& s, int at, int halves,
                                           const Lane& to) {
    return s.carry ? s.carry + ((size_t)at * halves + (halves == 2 ? to.h : 0)) * s.n + to.n
                   : static_cast<float*>(s.y) + row_of_y<At>(p, s, at) * s.y_stride + to.n;
}

// All turns of a block, over one pass or two. Groups of warps take units in turn; each warp of a group has
// slice number `within` of a pass. `place`: in lane i the row of y that column i belongs to, -1 beyond the
// last of `count`. `now`: the first bricks' scales, `scale` where they lie. `between` comes before a second
// pass.
template <int F, typename At, bool IS_F32, typename Between, typename Back, typename Fetch, typename Take>
__device__ __forceinline__ void take_turns(
    const Params& p, const Segment& s, int warp, int lane, int g, int t, int groups, int group, int within,
    int begin, int end, bool idle, int halves, bool paired, int expert, int place, int count, char* shared,
    const uint2* x_table, const float* undo_table, Scales<F> (&now)[AT_ONCE<F, At>], const uint8_t*& scale,
    size_t jump, const Back& back, const Fetch& fetch_next, const Take& take_chunk, const Between& between) {
    using X = Strides<F, At, IS_F32>;
    constexpr bool WIDE = At::IS_WIDE;
    constexpr int SCALE = Brick<F>::SCALE, SHARE = IS_F32 ? PARTS : 1;
    // Columns of a warp, if there are several passes: at least five warps share a sum then.
    constexpr int MAX_CARRIED = (At::HELD + 4) / 5;
    const size_t second = (paired ? 1 : jump) * SCALE, turn_bytes = second + jump * SCALE;
    const auto has_second = [&](int at) { return paired ? at < end : at + groups < end; };
    // Column i's routing weight in lane i, half a warp's factor.
    const float routing = s.routed == 1 && place >= 0 ? __ldcg(p.weights + place) : 1.f;
    const float factor = __ldg(s.factor + expert * halves + (halves == 2 ? lane >> 4 : 0)) *
                         (F <= MXFP4 ? E2M1_UNIT : 1.f);
    int unit = begin + group;
#pragma unroll 1
    for (int pass = 0; pass < (WIDE ? MAX_PASSES : 1); ++pass) {
        const int skipped = WIDE ? pass * s.warps : 0;
        if (WIDE && skipped >= s.span) break;
        const int slices = WIDE ? min(s.warps, s.span - skipped) : s.warps;
        if constexpr (WIDE)
            if (pass) {
                between(skipped, slices);
                unit = begin + group;
            }
        const bool multiplies = !WIDE || (!idle && within < slices);
        const int x_place = within + (At::SINGLE ? skipped : 0);
        const uint2* my_x = x_table + x_place * X::SLICE + g % At::HELD * X::COLUMN +
                            (F == NVFP4 ? 4 * t : t);
        const float undo0 = multiplies ? undo_table[x_place * COLUMNS + 2 * t / SHARE] : 1.f;
        const float undo1 = multiplies ? undo_table[x_place * COLUMNS + (2 * t + 1) / SHARE] : 1.f;
        for (int turn = 0; unit < end && !(WIDE && idle); unit += paired ? groups : 2 * groups, ++turn) {
            // This warp's to sum, another one each turn.
            const int column = within + turn - ((within + turn) * s.per_warp >> 16) * s.warps;
            float carried[MAX_CARRIED] = {};
            if constexpr (WIDE)
#pragma unroll
                for (int i = 0; i < MAX_CARRIED; ++i) {
                    if (pass == 0) break;
                    const int c = column + i * s.warps, at = __shfl_sync(~0u, place, c);
                    const Lane to(lane, unit, groups, paired);
                    if (c < count && to.tile < end && to.n < s.n)
                        carried[i] = *carry_of<At>(p, s, at, halves, to);
                }
            float* table = reinterpret_cast<float*>(shared) + (turn & 1) * At::TABLE;
            if constexpr (AT_ONCE<F, At> == 2) {
                const int after = unit + (paired ? groups : 2 * groups);
                multiply_pair<At>(now, scale, second, turn_bytes, has_second(unit), after < end,
                                  has_second(after), table, my_x, undo0, warp, lane, g, t, fetch_next,
                                  take_chunk);
            } else {
                for (int sub = 0; multiplies && sub < 2 && (paired || unit + sub * groups < end); ++sub) {
                    scale += (paired && sub == 0 ? 1 : jump) * SCALE;
                    bool more = paired ? sub == 0 || unit + groups < end : unit + (sub + 1) * groups < end;
                    if constexpr (WIDE)
                        if (!more && within + skipped + s.warps < s.span) {
                            scale += back() * SCALE;
                            more = true;
                        }
                    float sums[1][4] = {};
                    Scales<F> next = now[0];
                    if (more) next.load(scale, lane);
                    multiply_brick<F, At>(sums, my_x, now, lane, take_chunk, fetch_next);
                    now[0] = next;
                    put_sum<At>(table, warp * 2 + sub, sums[0], undo0, undo1, g, t);
                }
            }
            if (!At::SINGLE && s.warps == 1) __syncwarp();
            else group_barrier(group, s.warps * 32);
            // One warp per column; the others go on.
            const Lane to(lane, unit, groups, paired);
            const bool inside = to.tile < end && to.n < s.n;
            for (int c = column; c < count; c += s.warps) {
                float total = 0.f;
                if constexpr (WIDE) {
                    total = carried[0];
                    carried[0] = carried[MAX_CARRIED - 1];
                }
                const float* in = table + (group * s.warps * 2 + to.h) * At::SUMS + to.r;
                total = add_slices<F, At, IS_F32>(total, in, c, slices);
                const int at = __shfl_sync(~0u, place, c);
                if (WIDE && skipped + s.warps < s.span) {
                    if (inside) *carry_of<At>(p, s, at, halves, to) = total;
                    continue;
                }
                const float v = total * factor;
                const size_t y_at = row_of_y<At>(p, s, at) * s.y_stride + to.n;
                put_result<IS_F32>(p, s, v, routing, c, y_at, to, paired, inside);
                if (At::SINGLE && s.y_top) {
                    const uint32_t top = __reduce_max_sync(~0u, inside ? largest<1>({pack_bf16(v, 0.f)}) : 0);
                    if (lane == 0) atomicMax(s.y_top + at, top);
                }
            }
        }
    }
}
