// Decode step: attention of one row, from the queries as their product left them to the rotated-back result,
// in one launch.
//
// A cluster of blocks takes eight heads, or of many rows sixteen, in GROUPS of eight, with the same bits.
// Its blocks cut the keys evenly, 16 at a time (split-KV), by the row's position
// alone. Of a block's keys each warp has 64 channels, as keys and as values: it copies, decodes and
// multiplies those without waiting for another. Only scores change hands inside a block, only results inside
// a cluster: the block of a head sums them up.
//
// Codes are exact in FP16; a score's slice of 64 channels is multiplied by its key's scale in float32, values
// by their scale relative to the largest. Weights of keys are rounded to FP16 (rotary channels: BF16),
// relative to the block's peak.
//
// A launch finds its instructions in no cache: code that runs once takes as long as it takes to come, about
// 250 instructions in a microsecond. So loops are not unrolled, and what can be a shift is no division.
#include "attention.cuh"

// A warp's 64 channels of a pass's keys to shared memory: 16 bytes a lane, of eight keys at a time; zeros
// where there is no key.
template <int GROUPS>
__device__ __forceinline__ void copy_keys(const Attention& p, Memory<GROUPS>& s, int num_groups, bool is_rope,
                                          int warp, int g, int t) {
#pragma unroll 2
    for (int key = g; key < num_groups * 16; key += 8) {
        const uint8_t* data = s.from[key];
        const bool is_there = data != nullptr;
        data = is_there ? data + warp * SLICE_WIDTH + t * 16 : p.ring;
        copy16(is_rope ? s.rotary_at(key, t) : s.code_at(warp, key, t), data, is_there);
        if (is_rope) copy16(s.rotary_at(key, t + 4), data + (is_there ? 64 : 0), is_there);
    }
}

// A warp's scales of a pass's keys, as numbers, and relative to the largest, whose code is returned.
// `is_key`: of keys lane, lane + 32, ...
template <int GROUPS>
__device__ __forceinline__ uint32_t prepare_scales(Memory<GROUPS>& s, int num_groups, bool is_rope,
                                                   bool (&is_key)[PER_LANE], int warp, int lane) {
    uint32_t largest = 0;
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i) {
        const int key = lane + 32 * i;
        is_key[i] = key < KEYS && s.from[key] != nullptr;
        const uint32_t code = key < KEYS ? s.scale_codes[key][warp] : 0;
        largest = max(largest, code == 255 ? 0 : code);
    }
    largest = __reduce_max_sync(~0u, largest);
    if (!is_rope)
#pragma unroll 1
        for (int key = lane; key < num_groups * 16; key += 32) {
            const uint32_t code = s.scale_codes[key][warp];
            s.scales[warp][key] = e8m0_power(code);
            s.relative[warp][key] = code == 255 ? 0x7E00 : f16_power((int)largest - (int)code);
        }
    return largest;
}

// Weights of a pass's keys, from all warps' scores. A warp has a head of each group, a lane every 32nd key;
// `sum` is the lane's, `peak` and `total` the head's so far.
template <int GROUPS>
__device__ __forceinline__ void weigh_keys(const Attention& p, Memory<GROUPS>& s,
                                           const bool (&is_key)[PER_LANE], float (&peak)[GROUPS],
                                           float (&total)[GROUPS], float (&sum)[GROUPS], int warp, int lane) {
#pragma unroll
    for (int h = 0; h < GROUPS; ++h) {
        const int head = h * HEADS + warp;
        float score[PER_LANE];
        uint32_t best = 0;
#pragma unroll
        for (int i = 0; i < PER_LANE; ++i) {
            float v = 0.f;
            if (is_key[i])
#pragma unroll
                for (int w = 0; w < WARPS; ++w) v += s.scores[w][head][lane + 32 * i];
            score[i] = is_key[i] ? v * (p.scale * LOG2E) : -INFINITY;
            best = max(best, peak_key(score[i]));
        }
        const float higher = fmaxf(peak[h], from_peak_key(__reduce_max_sync(~0u, best)));
        const float base = finite_peak(higher), shrink = power_of_two(peak[h] - base);
        sum[h] = 0.f;
#pragma unroll
        for (int i = 0; i < PER_LANE; ++i) {
            const int key = lane + 32 * i;
            const float weight = power_of_two(score[i] - base);
            sum[h] += weight;
            if (key < KEYS) {
                s.weights[0][head][key] = (uint16_t)pack_f16(weight, 0.f);
                s.weights[1][head][key] = (uint16_t)pack_bf16(weight, 0.f);
            }
        }
        if (lane == 0) s.shrink[head] = shrink;
        total[h] *= shrink;
        peak[h] = higher;
    }
}

// Sends a warp's 64 channels to the block that sums a head up: head b of each group to block b. A head's go
// at once, from where the warp's keys were: in pieces of 16 bytes the network between blocks took longer than
// everything else.
template <int GROUPS>
__device__ __forceinline__ void send_results(Memory<GROUPS>& s, const float (&result)[GROUPS][4][4],
                                             const float (&peak)[GROUPS], const float (&total)[GROUPS],
                                             bool has_keys, bool is_rope, int block, int warp, int lane,
                                             int g, int t) {
    float (*staged)[STAGED_ROW] = reinterpret_cast<float (*)[STAGED_ROW]>(is_rope ? s.rotary[0]
                                                                                  : s.codes[warp][0]);
    __syncwarp();
#pragma unroll
    for (int h = 0; h < GROUPS; ++h) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {   // a head, 16 channels and 16 more
            const float (&low)[4] = result[h][i / 2 * 2];
            const float (&high)[4] = result[h][i / 2 * 2 + 1];
            const int j = i % 2;
            *reinterpret_cast<float4*>(&staged[h * HEADS + 2 * t + j][8 * g + i / 2 * 4]) = make_float4(
                low[j], low[2 + j], high[j], high[2 + j]);
        }
        if (lane == 0)
            send(s.peaks[h][block], make_uint2(__float_as_uint(peak[h]), __float_as_uint(total[h])), warp,
                 &s.inbox);
    }
    copies_may_follow();
    __syncwarp();
    if (has_keys && lane < GROUPS * HEADS)
        send_from(s.results[lane / HEADS][block][warp], staged[lane], SLICE_WIDTH * 4, lane % HEADS,
                  &s.inbox);
}

// Adds up what all blocks sent of this block's heads. A thread has two channels, as `add_values` had them.
template <int GROUPS>
__device__ __forceinline__ void sum_up(const Attention& p, const Memory<GROUPS>& s,
                                       const float (&sink)[GROUPS], const float (&back)[4], bool is_padding,
                                       bool is_rope, int row, int first_head, int block, int warp, int lane,
                                       int g, int t) {
#pragma unroll
    for (int h = 0; h < GROUPS; ++h) {
        float top = sink[h], whole = 0.f, x = 0.f, y = 0.f;
#pragma unroll
        for (int b = 0; b < CLUSTER; ++b)
            if (s.peaks[h][b][1] != 0.f) top = fmaxf(top, s.peaks[h][b][0]);
        top = finite_peak(top);
#pragma unroll
        for (int b = 0; b < CLUSTER; ++b) {
            const float of_block = s.peaks[h][b][1];
            if (of_block == 0.f) continue;   // without keys; its results were not sent
            const float weight = power_of_two(s.peaks[h][b][0] - top);
            const float2 of = *reinterpret_cast<const float2*>(&s.results[h][b][warp][2 * lane]);
            whole += weight * of_block;
            x += weight * of.x;
            y += weight * of.y;
        }
        whole += power_of_two(sink[h] - top);
        const float inverse = is_padding ? 0.f : reciprocal(whole);   // a row of padding is zero
        uint32_t both = pack_bf16(x * inverse, y * inverse);
        __nv_bfloat16* out = p.out + ((int64_t)row * p.heads + first_head + h * HEADS + block) * WIDTH +
                             warp * SLICE_WIDTH + 16 * t;
        if (is_rope) {
            const float2 own = open_bf16(both), other = open_bf16(__shfl_xor_sync(~0u, both, 4));
            const float sign = g & 1 ? -1.f : 1.f;
            both = pack_bf16(own.x * back[0] + other.x * back[2] * sign,
                             own.y * back[1] + other.y * back[3] * sign);
            reinterpret_cast<uint16_t*>(out)[g] = (uint16_t)both;
            reinterpret_cast<uint16_t*>(out)[g + 8] = (uint16_t)(both >> 16);
        } else {
            reinterpret_cast<uint32_t*>(out)[g] = both;
        }
    }
}

template <int GROUPS> __global__ void __launch_bounds__(WARPS * 32, 2) attention_kernel(const Attention p) {
    Memory<GROUPS>& s = *(Memory<GROUPS>*)shared_memory();
    launch_dependents();
    const int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31, g = lane >> 2, t = lane & 3;
    const int block = blockIdx.x % CLUSTER, cluster = blockIdx.x / CLUSTER;
    const int row = cluster >> p.group_bits,
              first_head = (cluster & ((1 << p.group_bits) - 1)) * GROUPS * HEADS;
    const Keys keys(p, row, block);
    const bool is_rope = warp == ROPE_WARP;
    if (tid == 0) open_inbox(&s.inbox, GROUPS * (keys.blocks * WIDTH * 4 + CLUSTER * 8));
    // Keys that are known before the selection, hence written before the launch that precedes this one.
    const bool is_known = !p.listed || keys.own == 0 || keys.in_ring(keys.own - 1);
    if (!is_known) wait_for_prerequisites();

    uint4 q[GROUPS][2];
    float sink[GROUPS], back[4];   // back: cos, sin of the two rotary channels that a thread ends with
    float peak[GROUPS],
        total[GROUPS] = {},
        result[GROUPS][4][4] = {};   // peak and total: of head `warp`; result: as `add_values` has it
#pragma unroll
    for (int h = 0; h < GROUPS; ++h) peak[h] = -INFINITY;
    int begin = 0;
#pragma unroll 1
    do {
        const int count = min(keys.own - begin, KEYS), num_groups = (count + 15) / 16;
        // A thread finds a key's row.
        uint2 scale_codes = make_uint2(0, 0);
        if (tid < KEYS) {
            const int at = keys.row(p, row, begin + tid);
            const bool in_ring = keys.in_ring(begin + tid);
            s.from[tid] = at < 0 ? nullptr : (in_ring ? p.ring : p.entries) + (int64_t)at * ROW;
            if (at >= 0)
                scale_codes = __ldcg(reinterpret_cast<const uint2*>(
                    (in_ring ? p.ring_scale : p.entries_scale) + (int64_t)at * SCALES));
        }
        __syncthreads();
        copy_keys<GROUPS>(p, s, num_groups, is_rope, warp, g, t);
        float4 turn[4];   // cos, sin of the 16 that it begins with
        if (begin == 0) {
            if (is_rope) {
                const int64_t angle = (int64_t)max(keys.position, 0) * HALF + t * 8;
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    turn[i] = __ldg(reinterpret_cast<const float4*>((i < 2 ? p.cos : p.sin) + angle) +
                                    (i & 1));
                    back[i] = __ldg((i < 2 ? p.cos : p.sin) + angle + (i & 1) * 4 + g / 2);
                }
            }
#pragma unroll
            for (int h = 0; h < GROUPS; ++h)
                sink[h] = __ldg(p.sinks + first_head + h * HEADS + block) * LOG2E;
            if (is_known) wait_for_prerequisites();
            const __nv_bfloat16* own = p.q + ((int64_t)row * p.heads + first_head + g) * WIDTH +
                                       warp * SLICE_WIDTH + t * 16;
#pragma unroll
            for (int h = 0; h < GROUPS; ++h)
#pragma unroll
                for (int i = 0; i < 2; ++i)
                    q[h][i] = __ldcg(reinterpret_cast<const uint4*>(own + h * HEADS * WIDTH) + i);
        }
        if (tid < KEYS) *reinterpret_cast<uint2*>(s.scale_codes[tid]) = scale_codes;
        if (begin == 0) prepare_queries(p, s, q, turn, warp, lane);   // with a barrier
        else __syncthreads();
        bool is_key[PER_LANE];
        const uint32_t largest = prepare_scales<GROUPS>(s, num_groups, is_rope, is_key, warp, lane);
        await_copies();
        __syncwarp();
        if (is_rope) {
#pragma unroll 1
            for (int i = 0; i < num_groups; ++i) score_keys<true, GROUPS>(s, q, i, warp, lane);
        } else {
#pragma unroll 1
            for (int i = 0; i < num_groups; ++i) score_keys<false, GROUPS>(s, q, i, warp, lane);
        }
        __syncthreads();
        float sum[GROUPS];
        weigh_keys<GROUPS>(p, s, is_key, peak, total, sum, warp, lane);
        __syncthreads();
        begin += KEYS;
        if (begin >= keys.own) {   // the inbox is open, and no scores of this block are read any more
            copies_may_follow();
            all_started();
        }
        float d[GROUPS][4][4] = {};
        if (is_rope) {
#pragma unroll 1
            for (int i = 0; i < num_groups; ++i) add_values<true, GROUPS>(s, d, i, warp, lane);
        } else {
#pragma unroll 1
            for (int i = 0; i < num_groups; ++i) add_values<false, GROUPS>(s, d, i, warp, lane);
        }
        const float unit = is_rope ? 1.f : __uint_as_float(largest << 23);
#pragma unroll
        for (int h = 0; h < GROUPS; ++h) {
#pragma unroll
            for (int i = 16; i; i /= 2) sum[h] += __shfl_xor_sync(~0u, sum[h], i);
            total[h] += sum[h];
#pragma unroll
            for (int i = 0; i < 16; ++i)
                result[h][i / 4][i % 4] = result[h][i / 4][i % 4] * s.shrink[h * HEADS + 2 * t + i % 2] +
                                          d[h][i / 4][i % 4] * unit;
        }
    } while (begin < keys.own);
    all_wait();
    send_results<GROUPS>(s, result, peak, total, keys.own, is_rope, block, warp, lane, g, t);
    await_inbox(&s.inbox);
    __syncwarp();
    all_started();   // all have what they were sent: memory may go
    sum_up<GROUPS>(p, s, sink, back, keys.position < 0, is_rope, row, first_head, block, warp, lane, g, t);
    __syncwarp();
    all_wait();
}

// What decode.py launches.
static_assert(sizeof(Memory<1>) == 75400 && sizeof(Memory<2>) == 100072 &&
              2 * HEADS * STAGED_ROW * 4 <= KEYS * SLICE_WIDTH);
template __global__ void attention_kernel<1>(const Attention);
template __global__ void attention_kernel<2>(const Attention);
