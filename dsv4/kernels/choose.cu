// Choices of a step, one block per decision: experts of the rows, entries to attend to, the next token.
#include <stdint.h>

constexpr int MAX_PAIRS = 1024, MAX_EXPERTS = 512, PAIRS_PER_TASK = 8;

// The largest of the warp's values, the lower index on a tie; every lane learns it.
__device__ __forceinline__ void best_of_warp(float& value, int& index) {
    for (int i = 16; i; i >>= 1) {
        const float v = __shfl_xor_sync(~0u, value, i);
        const int at = __shfl_xor_sync(~0u, index, i);
        if (v > value || (v == value && at < index)) { value = v; index = at; }
    }
}

// Routing: sqrt(softplus(logit)) weights the experts; the largest with bias, or a table by token id, names them.
// Then tasks: an expert with up to `per_task` of the pairs (row * choices + place) that go to it, by rising expert.
__global__ void __launch_bounds__(512) route_kernel(const float* logits, const float* bias, const int64_t* table, const int64_t* ids,
                             int rows, int experts, int choices, float route_scale, int per_task,
                             int* chosen, float* weights, int* task_expert, int* task_pairs) {
    __shared__ int pair_expert[MAX_PAIRS];
    __shared__ int warp_total[32];
    asm volatile("griddepcontrol.launch_dependents;");
    asm volatile("griddepcontrol.wait;" ::: "memory");
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, warps = blockDim.x >> 5;
    constexpr int MANY = MAX_EXPERTS / 32;
    for (int row = warp; row < rows; row += warps) {
        const float* z = logits + (size_t)row * experts;
        float score[MANY], key[MANY];
#pragma unroll
        for (int i = 0; i < MANY; ++i) {
            const int e = lane + 32 * i;
            if (i * 32 >= experts) break;
            const float v = e < experts ? z[e] : 0.f;
            score[i] = sqrtf(fmaxf(v, 0.f) + log1pf(expf(-fabsf(v))));
            key[i] = e < experts ? (bias ? score[i] + bias[e] : 0.f) : -INFINITY;
        }
        int mine = 0x7FFFFFFF;      // the expert this lane holds, for lanes below `choices`
        float mine_score = 0.f, total = 0.f;
        for (int c = 0; c < choices; ++c) {
            int index = 0x7FFFFFFF;
            float value = -INFINITY;
            if (table) {
                index = (int)table[ids[row] * choices + c];
            } else {
#pragma unroll
                for (int i = 0; i < MANY; ++i) {
                    if (i * 32 >= experts) break;
                    if (key[i] > value) { value = key[i]; index = lane + 32 * i; }
                }
                best_of_warp(value, index);
                if (index == 0x7FFFFFFF) index = c;   // all NaN: any choice, the logits will tell
            }
            float s = 0.f;
#pragma unroll
            for (int i = 0; i < MANY; ++i) {
                if (i * 32 >= experts) break;
                if (lane + 32 * i == index) { s = score[i]; key[i] = -INFINITY; }
            }
            s = __shfl_sync(~0u, s, index & 31);
            total += s;
            if (lane == c) { mine = index; mine_score = s; }
        }
        int place = 0;               // by rising expert; equal ones keep their order
        for (int c = 0; c < choices; ++c) {
            const int other = __shfl_sync(~0u, mine, c);
            place += other < mine || (other == mine && c < lane);
        }
        if (lane < choices) {
            const int pair = row * choices + place;
            pair_expert[pair] = mine;
            chosen[pair] = mine;
            weights[pair] = mine_score / total * route_scale;
        }
    }
    __syncthreads();

    const int pairs = rows * choices;
    int running = 0;
    for (int first = 0; first < experts; first += blockDim.x) {
        const int e = first + threadIdx.x;
        int count = 0;
        if (e < experts)
            for (int i = 0; i < pairs; ++i) count += pair_expert[i] == e;
        const int tasks = (count + per_task - 1) / per_task;
        int before = tasks;
        for (int i = 1; i < 32; i <<= 1) {
            const int v = __shfl_up_sync(~0u, before, i);
            if (lane >= i) before += v;
        }
        if (lane == 31) warp_total[warp] = before;
        __syncthreads();
        int offset = running, whole = running;
        for (int w = 0; w < warps; ++w) {
            if (w < warp) offset += warp_total[w];
            whole += warp_total[w];
        }
        int task = offset + before - tasks, filled = 0;
        if (count)
            for (int i = 0; i < pairs; ++i)
                if (pair_expert[i] == e) {
                    if (filled == 0) task_expert[task] = e;
                    task_pairs[task * PAIRS_PER_TASK + filled++] = i;
                    if (filled == per_task) { ++task; filled = 0; }
                }
        if (filled)
            for (; filled < PAIRS_PER_TASK; ++filled) task_pairs[task * PAIRS_PER_TASK + filled] = -1;
        running = whole;
        __syncthreads();
    }
    for (int task = running + threadIdx.x; task < pairs; task += blockDim.x) task_expert[task] = -1;
}

// Larger floats have larger keys; both zeros have one.
__device__ __forceinline__ uint32_t order(float v) {
    const uint32_t bits = __float_as_uint(v == 0.f ? 0.f : v);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// The `topk` largest of a row's first `count` scores, the lower index on a tie, in rising order; -1 beyond. With a
// page table, places in the pool instead of entry numbers. Radix selection: 11, 11 and 10 bits.
constexpr int SELECT_THREADS = 1024, BINS = 2048, SPAN = SELECT_THREADS * 4;
__global__ void __launch_bounds__(SELECT_THREADS) select_kernel(
    const float* scores, int64_t stride, const int* counts, const int64_t* positions, int ratio,
    const int* page_table, const int64_t* slots, int pages, int page_entries, int topk, int* out) {
    __shared__ uint32_t bins[BINS];
    __shared__ uint32_t warp_sum[32];
    __shared__ uint32_t found[2];
    asm volatile("griddepcontrol.launch_dependents;");
    asm volatile("griddepcontrol.wait;" ::: "memory");
    const int row = blockIdx.x, tid = threadIdx.x, warp = tid >> 5, lane = tid & 31;
    const float* s = scores + row * stride;
    int* to = out + (size_t)row * topk;
    const int count = counts ? counts[row] : (int)((positions[row] + 1) / ratio);
    const int* pages_of = page_table ? page_table + slots[row] * pages : nullptr;
    const auto place = [&](int entry) { return pages_of ? pages_of[entry / page_entries] * page_entries + entry % page_entries : entry; };
    if (count <= topk) {
        for (int i = tid; i < topk; i += SELECT_THREADS) to[i] = i < count ? place(i) : -1;
        return;
    }
    uint32_t prefix = 0, need = topk;   // of the keys that begin with `prefix`, the `need` largest are wanted
    const int shifts[3] = {21, 10, 0};
    for (int pass = 0; pass < 3; ++pass) {
        const int shift = shifts[pass], width = pass == 2 ? 10 : 11;
        for (int i = tid; i < BINS; i += SELECT_THREADS) bins[i] = 0;
        __syncthreads();
        for (int i = tid; i < count; i += SELECT_THREADS) {
            const uint32_t key = order(s[i]);
            if (pass == 0 || key >> (shift + width) == prefix) atomicAdd(&bins[(key >> shift) & ((1u << width) - 1)], 1);
        }
        __syncthreads();
        // Sums from the top: thread i owns bins 2i and 2i+1, counted from the highest.
        const int high = BINS - 1 - 2 * tid, low = high - 1;
        const uint32_t pair = bins[high] + bins[low];
        uint32_t upto = pair;
        for (int i = 1; i < 32; i <<= 1) {
            const uint32_t v = __shfl_up_sync(~0u, upto, i);
            if (lane >= i) upto += v;
        }
        if (lane == 31) warp_sum[warp] = upto;
        __syncthreads();
        if (warp == 0) {
            uint32_t v = warp_sum[lane];
            for (int i = 1; i < 32; i <<= 1) {
                const uint32_t o = __shfl_up_sync(~0u, v, i);
                if (lane >= i) v += o;
            }
            warp_sum[lane] = v;
        }
        __syncthreads();
        const uint32_t above = upto - pair + (warp ? warp_sum[warp - 1] : 0);
        if (above < need && need <= above + pair) {
            const bool in_high = need <= above + bins[high];
            found[0] = in_high ? high : low;
            found[1] = need - above - (in_high ? 0 : bins[high]);
        }
        __syncthreads();
        prefix = pass == 0 ? found[0] : (prefix << width) | found[0];
        need = found[1];
        __syncthreads();
    }
    // prefix is now the key of the last one taken; of those equal to it the first `need` are.
    uint32_t taken = 0, equal = 0;
    for (int first = 0; first < count; first += SPAN) {
        const int at = first + tid * 4;
        uint32_t key[4], sums = 0;   // low half: larger ones, high half: equal ones
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            key[i] = at + i < count ? order(s[at + i]) : 0;
            if (at + i < count) sums += key[i] > prefix ? 1u : key[i] == prefix ? 0x10000u : 0u;
        }
        uint32_t upto = sums;
        for (int i = 1; i < 32; i <<= 1) {
            const uint32_t v = __shfl_up_sync(~0u, upto, i);
            if (lane >= i) upto += v;
        }
        if (lane == 31) warp_sum[warp] = upto;
        __syncthreads();
        if (warp == 0) {
            uint32_t v = warp_sum[lane];
            for (int i = 1; i < 32; i <<= 1) {
                const uint32_t o = __shfl_up_sync(~0u, v, i);
                if (lane >= i) v += o;
            }
            warp_sum[lane] = v;
        }
        __syncthreads();
        const uint32_t before = upto - sums + (warp ? warp_sum[warp - 1] : 0);
        uint32_t larger = taken + (before & 0xFFFF), same = equal + (before >> 16);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (at + i >= count) break;
            if (key[i] > prefix) { to[larger + min(same, need)] = place(at + i); ++larger; }
            else if (key[i] == prefix) {
                if (same < need) to[larger + same] = place(at + i);
                ++same;
            }
        }
        taken += warp_sum[31] & 0xFFFF;
        equal += warp_sum[31] >> 16;
        __syncthreads();
    }
}

// The best token of each row, ties to the lower id, into `next`; rows in use move on by one position. A row without
// a finite best logit gives -1.
__global__ void __launch_bounds__(1024) greedy_kernel(const float* logits, int vocab, int64_t* next, int64_t* positions) {
    __shared__ float values[32];
    __shared__ int indices[32];
    asm volatile("griddepcontrol.launch_dependents;");
    asm volatile("griddepcontrol.wait;" ::: "memory");
    const int row = blockIdx.x, warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const float* z = logits + (size_t)row * vocab;
    float value = -INFINITY;
    int index = 0x7FFFFFFF;
    bool broken = false;
#pragma unroll 8
    for (int i = threadIdx.x; i < vocab; i += 1024) {
        const float v = z[i];
        broken |= isnan(v);
        if (v > value) { value = v; index = i; }
    }
    best_of_warp(value, index);
    if (lane == 0) { values[warp] = value; indices[warp] = index; }
    broken = __syncthreads_or(broken);
    if (warp == 0) {
        value = values[lane];
        index = indices[lane];
        best_of_warp(value, index);
        if (lane == 0) {
            const int64_t position = positions[row];
            if (position >= 0) {
                next[row] = broken || !isfinite(value) ? -1 : index;
                positions[row] = position + 1;
            }
        }
    }
}

template <typename... Parameters, typename... Arguments>
static int launch(void (*kernel)(Parameters...), int blocks, int threads, bool overlap, cudaStream_t stream, Arguments... arguments) {
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(blocks);
    config.blockDim = dim3(threads);
    config.stream = stream;
    cudaLaunchAttribute attribute;
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    config.attrs = &attribute;
    config.numAttrs = overlap ? 1 : 0;
    return (int)cudaLaunchKernelEx(&config, kernel, arguments...);
}

extern "C" int dsv4_route(const float* logits, const float* bias, const int64_t* table, const int64_t* ids, int rows,
                          int experts, int choices, float route_scale, int per_task, int* chosen, float* weights,
                          int* task_expert, int* task_pairs, int overlap, cudaStream_t stream) {
    return launch(route_kernel, 1, rows > 1 ? 512 : 256, overlap, stream, logits, bias, table, ids, rows, experts, choices,
                  route_scale, per_task, chosen, weights, task_expert, task_pairs);
}
extern "C" int dsv4_select(const float* scores, int64_t stride, const int* counts, const int64_t* positions, int ratio,
                           const int* page_table, const int64_t* slots, int pages, int page_entries, int rows, int topk,
                           int* out, int overlap, cudaStream_t stream) {
    return launch(select_kernel, rows, SELECT_THREADS, overlap, stream, scores, stride, counts, positions, ratio, page_table,
                  slots, pages, page_entries, topk, out);
}
extern "C" int dsv4_greedy(const float* logits, int rows, int vocab, int64_t* next, int64_t* positions, int overlap, cudaStream_t stream) {
    return launch(greedy_kernel, rows, 1024, overlap, stream, logits, vocab, next, positions);
}
extern "C" const char* dsv4_error(int code) { return cudaGetErrorString((cudaError_t)code); }
