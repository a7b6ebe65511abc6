// Decode step: which experts take the rows of a step.
#include "cluster.cuh"
#include "order.cuh"

constexpr int CLUSTER = 8, WARPS = 8;   // of a batch
constexpr int MAX_PAIRS = 1024, PAIRS_PER_TASK = 8;

// The index of the warp's largest key, the lower one on a tie; every lane learns it.
__device__ __forceinline__ int best_of_warp(uint32_t key, int index) {
    const uint32_t best = __reduce_max_sync(~0u, key);
    return (int)__reduce_min_sync(~0u, key == best ? (uint32_t)index : 0xFFFFFFFFu);
}

__device__ __forceinline__ float expert_score(float logit) {
    return sqrtf(fmaxf(logit, 0.f) + log1pf(expf(-fabsf(logit))));
}

struct Routing {
    const float* logits;                     // [rows][experts]
    const float* bias;                       // [experts], or null
    const int64_t* table;                    // [vocabulary][choices], or null
    const int64_t* ids;                      // [rows]
    const int64_t* positions;                // [rows], -1: padding, which has no tasks; or null
    int* counts;                             // [experts], or null
    int* chosen;                             // [rows][choices]
    float* weights;                          // beside them
    int* task_expert;                        // [rows * choices]
    int* task_pairs;                         // [rows * choices][PAIRS_PER_TASK]
    int rows, experts, choices, task_bits;   // a task holds up to 1 << task_bits pairs
    int first_own, own;                      // of the experts those that this rank has
    float route_scale;
};

// Routing: sqrt(softplus(logit)) weights the experts; the largest with bias, or a table by token id, names
// them. Then tasks: an expert with some of the pairs (row * choices + place) that go to it, by rising expert.
// Those of other ranks have none: of a single row their places say -1. A task names an expert by its number
// on this rank. A warp takes a row, MANY experts a lane; for a SINGLE row other warps help with the weights.
// Rows of a batch are shared by a cluster, whose first block learns all choices and makes the tasks.
template <int MANY> struct Lists {   // of the first block
    int first_task[32 * MANY], warp_total[WARPS];
    uint16_t before[MAX_PAIRS / 32]
                   [32 * MANY];   // pairs of an expert, of 32 in a row; then: of all before these
};

template <int MANY>
__device__ __forceinline__ void list_tasks(const Routing& p, Lists<MANY>& s, int* pair_expert) {
    constexpr int OWN = 32 * MANY / (32 * WARPS);   // experts of a thread
    const int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31, pairs = p.rows * p.choices,
              parts = (pairs + 31) / 32;
    for (int i = tid; i < parts * 16 * MANY; i += 32 * WARPS) reinterpret_cast<uint32_t*>(s.before)[i] = 0;
    __syncthreads();
    for (int part = warp; part < parts; part += WARPS) {
        const int pair = part * 32 + lane;
        const uint32_t here = pair < pairs ? pair_expert[pair] - p.first_own : ~0u;
        const bool is_own = here < (uint32_t)p.own;
        const uint32_t equal = __match_any_sync(~0u, is_own ? here : ~0u),
                       rank = __popc(equal & ((1u << lane) - 1));
        if (is_own && rank == 0) s.before[part][here] = (uint16_t)__popc(equal);
        if (pair < pairs) pair_expert[pair] = is_own ? (int)(here | rank << 16) : -1;
    }
    __syncthreads();
    int count[OWN], tasks[OWN], mine = 0;
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
        count[i] = 0;
        for (int part = 0; part < parts; ++part) {
            const int more = s.before[part][tid * OWN + i];
            s.before[part][tid * OWN + i] = (uint16_t)count[i];
            count[i] += more;
        }
        tasks[i] = (count[i] + (1 << p.task_bits) - 1) >> p.task_bits;
        mine += tasks[i];
    }
    int upto = mine;
    for (int i = 1; i < 32; i <<= 1) {
        const int v = __shfl_up_sync(~0u, upto, i);
        if (lane >= i) upto += v;
    }
    if (lane == 31) s.warp_total[warp] = upto;
    __syncthreads();
    int task = upto - mine, whole = 0;
    for (int w = 0; w < WARPS; ++w) {
        if (w < warp) task += s.warp_total[w];
        whole += s.warp_total[w];
    }
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
        s.first_task[tid * OWN + i] = task;
        for (int last = task + tasks[i]; task < last; ++task) p.task_expert[task] = tid * OWN + i;
        const int filled = count[i] & ((1 << p.task_bits) - 1);
        if (filled)
            for (int at = filled; at < PAIRS_PER_TASK; ++at)
                p.task_pairs[(task - 1) * PAIRS_PER_TASK + at] = -1;
    }
    for (int i = whole + tid; i < pairs; i += 32 * WARPS) p.task_expert[i] = -1;
    __syncthreads();
    for (int pair = tid; pair < pairs; pair += 32 * WARPS) {
        const int found = pair_expert[pair], here = found & 0xFFFF;
        if (found < 0) continue;
        const int at = s.before[pair / 32][here] + (found >> 16);
        p.task_pairs[(s.first_task[here] + (at >> p.task_bits)) * PAIRS_PER_TASK +
                     (at & ((1 << p.task_bits) - 1))] = pair;
    }
}

template <int MANY, bool SINGLE> struct Memory {
    union {
        float scores[SINGLE ? 1 : WARPS][32 * MANY];   // by row
        Lists<SINGLE ? 1 : MANY> lists;
    };
    int pair_expert[SINGLE ? 32 : MAX_PAIRS];
    Inbox inbox;   // of pair_expert
};

template <int MANY, bool SINGLE>
__global__ void __launch_bounds__(32 * (SINGLE ? MANY : WARPS)) route_kernel(const Routing p) {
    Memory<MANY, SINGLE>& s = *(Memory<MANY, SINGLE>*)shared_memory();
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, block = SINGLE ? 0 : blockIdx.x;
    const int pairs = p.rows * p.choices, first_row = SINGLE ? 0 : block + CLUSTER * warp;
    if (!SINGLE) {
        if (block == 0 && threadIdx.x == 0) open_inbox(&s.inbox, pairs * 4);
        __syncwarp();
        all_started();
    }
    float with[MANY];
#pragma unroll
    for (int i = 0; i < MANY; ++i)
        with[i] = p.bias && lane + 32 * i < p.experts ? __ldg(p.bias + lane + 32 * i) : 0.f;
    launch_dependents();
    // -1: the row's last logits were not finite.
    const auto listed_for = [&](int row) {
        return p.table && lane < p.choices
                   ? (int)p.table[max(__ldcg(p.ids + row), (int64_t)0) * p.choices + lane]
                   : 0;
    };
    int listed = first_row < p.rows ? listed_for(first_row) : 0;
    wait_for_prerequisites();
    if constexpr (SINGLE) {
        s.scores[0][threadIdx.x] = threadIdx.x < p.experts ? expert_score(__ldcg(p.logits + threadIdx.x))
                                                           : 0.f;
        __syncthreads();
        if (warp) return;
    } else {
        __syncwarp();
        all_wait();
    }
    for (int row = first_row; row < p.rows; row += CLUSTER * WARPS) {
        const bool is_used = !p.positions || __ldcg(p.positions + row) >= 0;
        float* scores = s.scores[SINGLE ? 0 : warp];
        uint32_t key[MANY];   // 0 is below every number's: taken, or no expert
        if constexpr (!SINGLE) {
            float logit[MANY];
#pragma unroll
            for (int i = 0; i < MANY; ++i)
                logit[i] = lane + 32 * i < p.experts
                               ? __ldcg(p.logits + (size_t)row * p.experts + lane + 32 * i)
                               : 0.f;
            if (row > first_row) listed = listed_for(row);
#pragma unroll
            for (int i = 0; i < MANY; ++i) scores[lane + 32 * i] = logit[i];
            // A loop, so that less has to be fetched.
#pragma unroll 2
            for (int i = lane; i < 32 * MANY; i += 32) scores[i] = expert_score(scores[i]);
            __syncwarp();
        }
#pragma unroll
        for (int i = 0; i < MANY; ++i)
            key[i] = lane + 32 * i < p.experts ? order(scores[lane + 32 * i] + with[i]) : 0;
        int mine = 0x7FFFFFFF;   // the expert this lane holds, for lanes below `choices`
        float mine_score = 0.f, total = 0.f;
#pragma unroll 1
        for (int c = 0; c < p.choices; ++c) {
            int index;
            if (p.table) index = __shfl_sync(~0u, listed, c);
            else {
                uint32_t best = key[0];
                int at = lane;
#pragma unroll
                for (int i = 1; i < MANY; ++i)
                    if (key[i] > best) {
                        best = key[i];
                        at = lane + 32 * i;
                    }
                index = best_of_warp(best, at);
#pragma unroll
                for (int i = 0; i < MANY; ++i)
                    if (lane + 32 * i == index) key[i] = 0;
            }
            const float score = scores[index];
            total += score;
            if (lane == c) {
                mine = index;
                mine_score = score;
            }
        }
        int place = 0;   // by rising expert; equal ones keep their order
#pragma unroll 1
        for (int c = 0; c < p.choices; ++c) {
            const int other = __shfl_sync(~0u, mine, c);
            place += other < mine || (other == mine && c < lane);
        }
        if (lane < p.choices) {
            const int pair = row * p.choices + place;
            if constexpr (SINGLE) s.pair_expert[pair] = mine;
            else send(s.pair_expert + pair, is_used ? (uint32_t)mine : ~0u, 0, &s.inbox);
            p.chosen[pair] = mine;
            // How often each expert is chosen.
            if (p.counts && is_used) atomicAdd(p.counts + mine, 1);
            p.weights[pair] = mine_score / total * p.route_scale;
        }
        __syncwarp();
    }
    if constexpr (SINGLE) {   // every choice is a task
        for (int i = lane; i < pairs * PAIRS_PER_TASK; i += 32)
            p.task_pairs[i] = i % PAIRS_PER_TASK ? -1 : i / PAIRS_PER_TASK;
        const uint32_t here = lane < pairs ? s.pair_expert[lane] - p.first_own : 0;
        if (lane < pairs) p.task_expert[lane] = here < (uint32_t)p.own ? (int)here : -1;
    } else if (block == 0) {
        await_inbox(&s.inbox);
        __syncthreads();   // of the scores too
        list_tasks<MANY>(p, s.lists, s.pair_expert);
    }
}

// What decode.py launches.
static_assert(sizeof(Memory<8, true>) == 2344 && sizeof(Memory<16, true>) == 2344);
static_assert(sizeof(Memory<8, false>) == 21544 && sizeof(Memory<16, false>) == 38952);
template __global__ void route_kernel<8, true>(const Routing);
template __global__ void route_kernel<16, true>(const Routing);
template __global__ void route_kernel<8, false>(const Routing);
template __global__ void route_kernel<16, false>(const Routing);
