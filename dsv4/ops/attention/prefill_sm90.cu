// Prompts: attention of 64 heads of one token over keys that are the values too, on Hopper's asynchronous
// tensor cores.
//
// Keys are gathered 64 at a time into one of two buffers by four warps. Two warpgroups multiply: of the
// scores each has 32 keys, of the result 256 channels; peaks and weights change hands in shared memory. The
// order of the keys (the window's, then the entries') follows from the token's position alone, so a result
// does not depend on chunks or neighbours.
//
// A head's result is a slice of the product that follows it, so it is written as that reads it
// (linear/prefill_packed.cuh).
#include "prefill_packed.cuh"
#include "roles.cuh"
#include "rope.cuh"
#include "wgmma.cuh"

constexpr int HEADS = 64, WIDTH = 512, ROPE = 64, KEYS = 64, CONSUMERS = 256, PRODUCERS = 128;
constexpr int ATOM = 64 * 128;   // bytes of 64 rows of 64 channels, swizzled by 128 bytes
constexpr int Q_BYTES = HEADS * WIDTH * 2, K_BYTES = KEYS * WIDTH * 2, P_BYTES = HEADS * KEYS * 2;
constexpr int OWN_ROWS = KEYS / 4;   // keys that a producing warp copies
constexpr float LOG2E = 1.4426950408889634f;
constexpr int AS_IT_IS = 3;   // a mode beside those of linear/prefill_packed.cuh
static_assert(WIDTH == SLICE);

struct Attend {
    const __nv_bfloat16* q;      // [tokens, heads, WIDTH]
    const __nv_bfloat16* keys;   // [rows, WIDTH]: the ring's, this step's, the pool's
    const int* rows;         // [tokens, list_width] rows of the pool, -1: none; null: all that the token sees
    const int* page_table;   // [slots, pages]
    const int64_t *slots, *positions, *first;
    const float *sinks, *cos, *sin;   // [heads], [tokens, ROPE / 2]
    char* out;                        // as q, or packed: a matrix for each group of heads
    int tokens, heads, window, ring_size, ring_rows, list_width, ratio, page_entries, pages;
    int group_heads, rows_padded;   // of out, if it is packed
    int has_pool, is_raw;           // is_raw: q is to be normed and rotated
    float scale, eps;
};

struct Control {   // in shared memory, behind the buffers
    uint64_t full[2], empty[2];
    uint16_t is_key[2][4];   // a bit for each key of a buffer, by producing warp
    int num_blocks;
    float scales[HEADS];        // what turns a score into a power of two's exponent
    float peaks[2][2][HEADS];   // by parity of the block, warpgroup
    float totals[2][HEADS];
    uint32_t tops[2]
                 [HEADS];   // the largest of the result, as linear/prefill_packed.cuh's peaks, by warpgroup
};
static_assert(sizeof(Control) <= 3072);   // prefill_sm90.py counts on it

__device__ __forceinline__ void consumer_barrier() { some_threads_meet<1, CONSUMERS>(); }
// A twin on the CPU (tests/kernels) has its own of these.
#ifdef __CUDACC__
// What threads wrote to shared memory is seen by the tensor core.
__device__ __forceinline__ void show_tensor_core() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
__device__ __forceinline__ float power_of_two(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
// The first `bytes` of 16, past L1; then zeros. Copies come in groups, of which at most `PENDING` are not
// complete after a wait.
__device__ __forceinline__ void copy_chunk(uint32_t to, const void* from, int bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING> __device__ __forceinline__ void await_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

#define F8(I)                                                                                   \
    "+f"(d[I]), "+f"(d[I + 1]), "+f"(d[I + 2]), "+f"(d[I + 3]), "+f"(d[I + 4]), "+f"(d[I + 5]), \
        "+f"(d[I + 6]), "+f"(d[I + 7])
#define F32(I) F8(I), F8(I + 8), F8(I + 16), F8(I + 24)
// [64 heads, 32 keys] of 16 channels; `adds` 0: d is overwritten.
__device__ __forceinline__ void multiply_keys(float (&d)[16], uint64_t q, uint64_t keys, int adds) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %18, 0;\nwgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {"
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, %16, %17, p, 1, 1, 0, 0;\n}"
        : F8(0), F8(8)
        : "l"(q), "l"(keys), "r"(adds));
}
// [64 heads, 256 channels] of 16 keys.
__device__ __forceinline__ void multiply_values(float (&d)[128], uint64_t weights, uint64_t values) {
    asm volatile(
        "{\nwgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {"
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,"
        "%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
        "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,"
        "%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63,"
        "%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,"
        "%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95,"
        "%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,%112,"
        "%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127}, "
        "%128, %129, 1, 1, 1, 0, 1;\n}"
        : F32(0), F32(32), F32(64), F32(96)
        : "l"(weights), "l"(values));
}
#undef F8
#undef F32
#endif

struct Where {                           // of a token
    int token, position, raw, entries;   // keys of the window and of the pool
    int64_t slot, first;
};

// The row of a token's key number `place`, -1: none.
__device__ __forceinline__ int row_of(const Attend& p, const Where& at, int place) {
    if (place < at.raw) {
        const int key = at.position - at.raw + 1 + place;
        if (key >= at.first) return p.ring_rows + at.token - (at.position - key);
        return (int)at.slot * p.ring_size + key % p.ring_size;
    }
    const int entry = place - at.raw;
    if (entry >= at.entries) return -1;
    int row;
    if (p.rows) row = __ldcg(p.rows + (int64_t)at.token * p.list_width + entry);
    else
        row = __ldcg(p.page_table + at.slot * p.pages + entry / p.page_entries) * p.page_entries +
              entry % p.page_entries;
    return row < 0 ? -1 : row + p.ring_rows + p.tokens;
}

// The place after the last one listed.
__device__ __forceinline__ int listed(const Attend& p, int token, int lane) {
    constexpr int AHEAD = 16;   // loads in flight
    const int* rows = p.rows + (int64_t)token * p.list_width;
    int end = 0;
    for (int begin = lane; begin < p.list_width + lane; begin += AHEAD * 32) {
        int row[AHEAD];
#pragma unroll
        for (int i = 0; i < AHEAD; ++i)
            row[i] = begin + i * 32 < p.list_width ? __ldcg(rows + begin + i * 32) : -1;
#pragma unroll
        for (int i = 0; i < AHEAD; ++i)
            if (row[i] >= 0) end = begin + i * 32 + 1;
    }
    return __reduce_max_sync(~0u, end);
}

__device__ __forceinline__ void gather(const Attend& p, Where at, Control* control, uint32_t buffers,
                                       int warp, int lane) {
    at.entries = !p.has_pool ? 0 : p.rows ? listed(p, at.token, lane) : (at.position + 1) / p.ratio;
    const int blocks = max(1, (at.raw + at.entries + KEYS - 1) / KEYS);
    if (warp == 0 && lane == 0) control->num_blocks = blocks;
    const int own = warp * OWN_ROWS + (lane & (OWN_ROWS - 1));   // of a block's keys
    int row = row_of(p, at, own);
    const auto copy = [&](int block) {
        const uint32_t to = buffers + (block & 1) * K_BYTES + (lane >> 3) * ATOM;
        const int now = row;
        row = row_of(p, at, (block + 1) * KEYS + own);
        const uint32_t is_key = __ballot_sync(~0u, now >= 0);
        if (lane == 0) control->is_key[block & 1][warp] = (uint16_t)is_key;
#pragma unroll
        for (int i = 0; i < OWN_ROWS; ++i) {
            const int from = __shfl_sync(~0u, now, i), key = warp * OWN_ROWS + i;
            const __nv_bfloat16* source = p.keys + (int64_t)max(from, 0) * WIDTH + lane * 8;
            const uint32_t at_row = to + key * 128 + (((lane ^ key) & 7) << 4);
            const int bytes = from < 0 ? 0 : 16;   // the rest is zero
            copy_chunk(at_row, source, bytes);
            copy_chunk(at_row + 4 * ATOM, source + 256, bytes);
        }
        commit_copies();
    };
    const auto deliver = [&](int block) {
        show_tensor_core();
        __syncwarp();
        if (lane == 0) arrive(shared_address(&control->full[block & 1]));
    };
    copy(0);
    if (blocks > 1) {
        copy(1);
        await_copies<1>();
        deliver(0);
    }
    await_copies<0>();
    deliver(blocks > 1);
    for (int block = 2; block < blocks; ++block) {
        await(shared_address(&control->empty[block & 1]), (block >> 1 & 1) ^ 1);
        copy(block);
        await_copies<0>();
        deliver(block);
    }
}

// Eight heads of a warp into shared memory, normed (by a factor of the scores) and rotated.
__device__ __forceinline__ void load_queries(const Attend& p, const __nv_bfloat16* q, int token,
                                             Control* control, char* to, int warp, int lane) {
    uint4 v[8][2];
#pragma unroll
    for (int i = 0; i < 8; ++i)
#pragma unroll
        for (int half = 0; half < 2; ++half)
            v[i][half] = __ldcg(
                reinterpret_cast<const uint4*>(q + (warp * 8 + i) * WIDTH + half * 256 + lane * 8));
    float4 c = make_float4(1.f, 1.f, 1.f, 1.f), s = make_float4(0.f, 0.f, 0.f, 0.f);
    const bool turns = p.is_raw && lane >= 24;   // the last 64 channels, in the second half
    if (turns) {
        c = __ldcg(reinterpret_cast<const float4*>(p.cos + (int64_t)token * (ROPE / 2)) + lane - 24);
        s = __ldcg(reinterpret_cast<const float4*>(p.sin + (int64_t)token * (ROPE / 2)) + lane - 24);
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const int head = warp * 8 + i;
        float factor = 1.f;
        if (p.is_raw) {
            float square = 0.f;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const uint32_t words[4] = {v[i][half].x, v[i][half].y, v[i][half].z, v[i][half].w};
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    const float2 pair = open_bf16(words[j]);
                    square = fmaf(pair.x, pair.x, fmaf(pair.y, pair.y, square));
                }
            }
#pragma unroll
            for (int lanes = 16; lanes; lanes /= 2) square += __shfl_xor_sync(~0u, square, lanes);
            factor = __fdiv_rn(1.f, __fsqrt_rn(square * (1.f / WIDTH) + p.eps));
        }
        if (lane == 0) control->scales[head] = p.scale * factor * LOG2E;
        if (turns) {
            uint4& w = v[i][1];
            w = make_uint4(rotated(w.x, c.x, s.x), rotated(w.y, c.y, s.y), rotated(w.z, c.z, s.z),
                           rotated(w.w, c.w, s.w));
        }
#pragma unroll
        for (int half = 0; half < 2; ++half)
            *reinterpret_cast<uint4*>(to + (half * 4 + (lane >> 3)) * ATOM + head * 128 +
                                      (((lane ^ head) & 7) << 4)) = v[i][half];
    }
}

// Where a result waits to be stored: word `word` of chunk `chunk` of a warpgroup's 32, such that lanes of
// different rows meet in no bank. Then the words of a chunk.
template <int MODE> __device__ __forceinline__ int place_of(int row, int group, int chunk, int word) {
    if constexpr (MODE == AS_IT_IS) chunk ^= row & 7;
    else if constexpr (MODE == FP16_BY_64) {
        chunk ^= (row & 1) * 4;
        word ^= row >> 1 & 3;
    } else {
        chunk ^= (row & 3) * 2;
        word ^= (row >> 2 & 1) * 2;
    }
    return row * 1024 + (group * 32 + chunk) * 16 + word * 4;
}
template <int MODE>
__device__ __forceinline__ uint4 chunk_at(const char* shared, int row, int group, int chunk) {
    const uint4 v = *reinterpret_cast<const uint4*>(shared + (place_of<MODE>(row, group, chunk, 0) & ~15));
    const int by = MODE == AS_IT_IS ? 0 : MODE == FP16_BY_64 ? row >> 1 & 3 : (row >> 2 & 1) * 2;
    const uint4 w = by & 1 ? make_uint4(v.y, v.x, v.w, v.z) : v;
    return by & 2 ? make_uint4(w.z, w.w, w.x, w.y) : w;
}

// A warp's results, times `total`: rotated back, into shared memory where the queries were, then out, in rows
// that products read. Each warp has room for its heads' 256 channels.
template <int MODE>
__device__ __forceinline__ void put_results(const Attend& p, const Where& at, const float (&result)[128],
                                            const float (&total)[2], int first_head, int64_t own,
                                            Control* control, char* shared, int warp, int group, int head,
                                            int t, int lane) {
    uint32_t tops[2] = {0, 0};
#pragma unroll
    for (int i = 0; i < 32; ++i)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int row = head + h * 8;
            uint32_t pair = pack_bf16(result[4 * i + 2 * h] * total[h], result[4 * i + 2 * h + 1] * total[h]);
            if (i >= 24 && group == 1) {   // the last channels are rotated back
                const int64_t angle = (int64_t)at.token * (ROPE / 2) + (i - 24) * 4 + t;
                const float2 v = open_bf16(pair);
                const float c = __ldcg(p.cos + angle), s = __ldcg(p.sin + angle);
                pair = pack_bf16(v.x * c + v.y * s, v.y * c - v.x * s);
            }
            // Eight channels are pairs 4 i to 4 i + 3.
            int chunk = i, word = t;
            if constexpr (MODE == FP16_BY_64) {
                chunk = i / 8 * 8 + i % 2 * 4 + t;
                word = i % 8 / 2;
            } else if constexpr (MODE != AS_IT_IS) {
                chunk = i / 2 * 2 + t % 2;
                word = i % 2 * 2 + t / 2;
            }
            *reinterpret_cast<uint32_t*>(shared + place_of<MODE>(row, group, chunk, word)) = pair;
            tops[h] = larger(tops[h], pair & 0x7FFF7FFF);
        }
    constexpr bool IS_SCALED = MODE == FP16_BY_64 || MODE == FP16_BY_16;
    if constexpr (IS_SCALED) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            tops[h] = larger(tops[h], __shfl_xor_sync(~0u, tops[h], 1));
            tops[h] = larger(tops[h], __shfl_xor_sync(~0u, tops[h], 2));
            if (t == 0) control->tops[group][head + h * 8] = tops[h];
        }
        consumer_barrier();
    } else __syncwarp();
    // A lane knows one row's scale, and where it goes: a division takes longer than a row.
    const int its = (warp & 3) * 16 + (lane & 15), its_head = first_head + its,
              matrix = its_head / p.group_heads;
    const Scale16 scales(IS_SCALED ? larger(control->tops[0][its], control->tops[1][its]) : 0);
    const int its_place = (matrix * (p.rows_padded / ROW_GROUP) + at.token / ROW_GROUP) * p.group_heads +
                          its_head - matrix * p.group_heads;
    char* to = p.out + chunk_16(at.token, group * 32 + lane);
    if (MODE != AS_IT_IS && group == 0 && lane < 16)
        *reinterpret_cast<float*>(p.out + (size_t)its_place * SLICE_16 +
                                  undo_16(at.token)) = IS_SCALED ? scales.undo : 1.f;
#pragma unroll
    for (int i = 0; i < 16; ++i) {
        const int row = (warp & 3) * 16 + i;
        uint4 v = chunk_at<MODE>(shared, row, group, lane);
        if constexpr (MODE == AS_IT_IS) {
            __stcg(reinterpret_cast<uint4*>(p.out) + (own + row * WIDTH) / 8 + group * 32 + lane, v);
            continue;
        }
        if constexpr (IS_SCALED) {
            Scale16 scale = scales;
            scale.up = __shfl_sync(~0u, scales.up, i);
            v = make_uint4(scale.of(v.x), scale.of(v.y), scale.of(v.z), scale.of(v.w));
        }
        __stcg(reinterpret_cast<uint4*>(to + (size_t)(uint32_t)__shfl_sync(~0u, its_place, i) * SLICE_16), v);
    }
}

template <int MODE>
__device__ __forceinline__ void attend(const Attend& p, const Where& at, int first_head, Control* control,
                                       char* shared, int warp, int lane) {
    const uint32_t k_at = shared_address(shared) + Q_BYTES;
    const uint64_t queries = swizzled_matrix(shared_address(shared), 16),
                   weights_at = swizzled_matrix(k_at + 2 * K_BYTES, 16);
    char* weights = shared + Q_BYTES + 2 * K_BYTES;
    const int64_t own = ((int64_t)at.token * p.heads + first_head) * WIDTH;
    load_queries(p, p.q + own, at.token, control, shared, warp, lane);
    show_tensor_core();
    consumer_barrier();
    const int group = warp >> 2, g = lane >> 2, t = lane & 3,
              head = (warp & 3) * 16 + g;   // this thread's: head, head + 8
    float scale[2], peak[2], total[2], result[128], score[16];
#pragma unroll
    for (int i = 0; i < 128; ++i) result[i] = 0.f;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        // The sink takes part as a key without a value. Its limits keep differences of infinities away.
        const float sink = __ldg(p.sinks + first_head + head + h * 8);
        scale[h] = control->scales[head + h * 8];
        peak[h] = fminf(fmaxf(sink, -1e30f), 1e30f) * LOG2E;
        total[h] = group == 0 && t == 0 && sink > -1e30f ? 1.f : 0.f;
    }
    int blocks = 1;   // the producers know
#pragma unroll 1
    for (int block = 0; block < blocks; ++block) {
        const uint64_t keys = swizzled_matrix(k_at + (block & 1) * K_BYTES + group * 32 * 128, 16);
        await(shared_address(&control->full[block & 1]), block >> 1 & 1);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < WIDTH / 16; ++i)
            multiply_keys(score, queries + (i / 4 * ATOM + i % 4 * 32 >> 4),
                          keys + (i / 4 * ATOM + i % 4 * 32 >> 4), i);
        wgmma_commit();
        blocks = *reinterpret_cast<volatile int*>(&control->num_blocks);
        const uint32_t is_key =
            *reinterpret_cast<volatile uint32_t*>(&control->is_key[block & 1][group * 2]) >> 2 * t;
        wgmma_wait<0>();
        float higher[2] = {peak[0], peak[1]}, shrink[2];
#pragma unroll
        for (int i = 0; i < 16; ++i) {   // i / 4: eight keys; i & 2: head; i & 1: key
            score[i] = is_key >> (i / 4 * 8 + (i & 1)) & 1 ? score[i] * scale[i / 2 & 1] : -INFINITY;
            higher[i / 2 & 1] = fmaxf(higher[i / 2 & 1], score[i]);
        }
        float (&peaks)[2][HEADS] = control->peaks[block & 1];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            higher[h] = fmaxf(higher[h], __shfl_xor_sync(~0u, higher[h], 1));
            higher[h] = fmaxf(higher[h], __shfl_xor_sync(~0u, higher[h], 2));
            if (t == 0) peaks[group][head + h * 8] = higher[h];
        }
        consumer_barrier();
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            higher[h] = fmaxf(higher[h], peaks[group ^ 1][head + h * 8]);
            shrink[h] = power_of_two(peak[h] - higher[h]);
            peak[h] = higher[h];
            total[h] *= shrink[h];
        }
#pragma unroll
        for (int i = 0; i < 16; i += 2) {
            const int h = i / 2 & 1, row = head + h * 8;
            const float low = power_of_two(score[i] - higher[h]),
                        high = power_of_two(score[i + 1] - higher[h]);
            total[h] += low + high;
            *reinterpret_cast<uint32_t*>(weights + row * 128 + ((group * 4 + i / 4 ^ row & 7) << 4) +
                                         t * 4) = pack_bf16(low, high);
        }
        if (__any_sync(~0u, shrink[0] != 1.f || shrink[1] != 1.f))
#pragma unroll
            for (int i = 0; i < 128; ++i) result[i] *= shrink[i / 2 & 1];
        show_tensor_core();
        consumer_barrier();
        const uint64_t values = swizzled_matrix(k_at + (block & 1) * K_BYTES + group * 4 * ATOM, ATOM);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < KEYS / 16; ++i)
            multiply_values(result, weights_at + (i * 32 >> 4), values + (i * 2048 >> 4));
        wgmma_commit();
        wgmma_wait<0>();
        __syncwarp();
        if (lane == 0) arrive(shared_address(&control->empty[block & 1]));
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        total[h] += __shfl_xor_sync(~0u, total[h], 1);
        total[h] += __shfl_xor_sync(~0u, total[h], 2);
        if (t == 0) control->totals[group][head + h * 8] = total[h];
    }
    consumer_barrier();
#pragma unroll
    for (int h = 0; h < 2; ++h)
        total[h] = __fdiv_rn(1.f, control->totals[0][head + h * 8] + control->totals[1][head + h * 8]);
    put_results<MODE>(p, at, result, total, first_head, own, control, shared, warp, group, head, t, lane);
}

template <int MODE>
__global__ void __launch_bounds__(CONSUMERS + PRODUCERS, 1) attend_kernel(const __grid_constant__ Attend p) {
    extern __shared__ __align__(1024) char shared[];
    Control* control = reinterpret_cast<Control*>(shared + Q_BYTES + 2 * K_BYTES + P_BYTES);
    const int warp = __shfl_sync(~0u, threadIdx.x >> 5, 0),
              lane = threadIdx.x & 31;   // uniform, as descriptors want it
    if (threadIdx.x < 2) {
        open_barrier(shared_address(&control->full[threadIdx.x]), PRODUCERS / 32);
        open_barrier(shared_address(&control->empty[threadIdx.x]), CONSUMERS / 32);
        copies_see_barriers();
    }
    __syncthreads();
    wait_for_prerequisites();
    const int groups = p.heads / HEADS;
    Where at;
    at.token = blockIdx.x / groups;
    at.position = (int)__ldcg(p.positions + at.token);
    at.slot = __ldcg(p.slots + at.token);
    at.first = __ldcg(p.first + at.token);
    at.raw = min(at.position + 1, p.window);
    at.entries = 0;
    if (warp >= CONSUMERS / 32) {
        keep_registers<56>();
        gather(p, at, control, shared_address(shared) + Q_BYTES, warp - CONSUMERS / 32, lane);
    } else {
        take_registers<224>();
        attend<MODE>(p, at, blockIdx.x % groups * HEADS, control, shared, warp, lane);
    }
}

template __global__ void attend_kernel<FP16_BY_64>(const __grid_constant__ Attend);
template __global__ void attend_kernel<FP16_BY_16>(const __grid_constant__ Attend);
template __global__ void attend_kernel<BF16_BY_16>(const __grid_constant__ Attend);
template __global__ void attend_kernel<AS_IT_IS>(const __grid_constant__ Attend);
