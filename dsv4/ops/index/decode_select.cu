// Decode step: which entries to attend to, one block or cluster per row. Serves prompts too.
#include "cluster.cuh"
#include "order.cuh"

constexpr int CLUSTER = 8, THREADS = 1024;   // of a long row
constexpr int FEW_KEYS = 8;                  // of a thread, of a row that one block takes
constexpr int BIN_BITS = 8, BINS = 1 << BIN_BITS, ROUNDS = 32 / BIN_BITS;

// The `topk` largest of a row's first `count` scores, the lower index on a tie, in rising order, as places in
// the pool; -1 beyond. The key of the last one taken is looked for in a histogram of the keys between the
// least and the largest, then in one of its bin's keys, and so on: two or three suffice, since scores are
// spread.
struct Choice {
    const float* scores;   // [rows][stride]
    int64_t stride;
    const int64_t* positions;   // [rows]
    int ratio;
    const int* page_table;   // [slots][pages]
    const int64_t* slots;    // [rows]
    int pages, page_entries, topk;
    int fewest, most;      // entries of a row that this launch chooses from; other rows are another launch's
    int warms;             // its instructions, before the wait
    uint64_t page_share;   // 2^42 / page_entries, rounded up: entries and pages have fewer than 2^21
    int* out;              // [rows][topk]

    // A position is below 2^31, or -1.
    __device__ __forceinline__ int count(int row) const {
        return (int)((uint32_t)(__ldcg(positions + row) + 1) / (uint32_t)ratio);
    }
    __device__ __forceinline__ const int* pages_of(int row) const {
        return page_table + __ldcg(slots + row) * pages;
    }
    __device__ __forceinline__ int place(const int* table, int entry) const {
        const uint32_t page = (uint32_t)((uint32_t)entry * page_share >> 42);
        return (__ldcg(table + page) - (int)page) * page_entries + entry;
    }
};

// Of the keys from `low` to `low + span` the `need` largest are wanted. Every thread has one.
struct Search {
    uint32_t low, span, need;
    int shift;   // a bin has 1 << shift keys

    __device__ __forceinline__ Search(uint32_t least, uint32_t largest, uint32_t topk)
        : low(least),
          span(largest - least),
          need(topk),
          shift(max(32 - BIN_BITS - __clz(largest - least), 0)) {}
    __device__ __forceinline__ void count(uint32_t key, uint32_t* bins) const {
        if (key - low <= span) atomicAdd(bins + ((key - low) >> shift), 1u);
    }
    // The need'th is in this bin, which has so many keys, with so many above. True at the end: then `low` is
    // its key, or else exactly the wanted keys are larger than `low`.
    __device__ __forceinline__ bool narrow(uint32_t bin, uint32_t above, uint32_t inside) {
        low += bin << shift;
        if (above + inside == need) {
            --low;
            return true;
        }
        if (shift == 0) return true;
        span = min((1u << shift) - 1, span - (bin << shift));
        need -= above;
        shift = max(shift - BIN_BITS, 0);
        return false;
    }
};

struct Found {
    uint32_t bin, above, inside;
};
// By one warp: the bin of the need'th largest key, counted from the last bin on.
__device__ __forceinline__ void find(const uint32_t* bins, uint32_t need, Found* found) {
    constexpr int EACH = BINS / 32;
    const int lane = threadIdx.x & 31;
    uint32_t inside[EACH], mine = 0;
#pragma unroll
    for (int i = 0; i < EACH; i += 4) {
        const uint4 four = *reinterpret_cast<const uint4*>(bins + lane * EACH + i);
        inside[i] = four.x;
        inside[i + 1] = four.y;
        inside[i + 2] = four.z;
        inside[i + 3] = four.w;
    }
#pragma unroll
    for (int i = 0; i < EACH; ++i) mine += inside[i];
    uint32_t upto = mine;
#pragma unroll
    for (int i = 1; i < 32; i <<= 1) {
        const uint32_t v = __shfl_down_sync(~0u, upto, i);
        if (lane + i < 32) upto += v;
    }
    uint32_t above = upto - mine, total = above, bin = lane * EACH + EACH - 1, in = inside[EACH - 1];
    if (above >= need || upto < need) return;   // all lanes but one
#pragma unroll
    for (int i = EACH - 1; i > 0; --i) {
        total += inside[i];
        if (total < need) {
            above = total;
            bin = lane * EACH + i - 1;
            in = inside[i - 1];
        }
    }
    *found = {bin, above, in};
}

// A row of few entries is one block's: each warp has as many, in a row, a lane KEYS of them in registers at
// most.
struct Few {
    uint32_t bins[ROUNDS * BINS];
    uint32_t least[32], largest[32], tallies[32];   // of the warps
    Found found;
    uint32_t padding;
};

// A launch finds its instructions in no cache, and this code runs once: with `warms` it runs before the wait
// too, on a single number, so that it is there when the scores are. Where every entry lies in the pool is
// known before.
template <int WARPS, int KEYS>
__device__ __forceinline__ void choose_few(const Choice& p, Few& s, int row, int count) {
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, topk = p.topk;
    const int each = (count + WARPS * 32 - 1) / (WARPS * 32) * 32, start = warp * each + lane,
              end = min(warp * each + each, count);
    const int* pages = p.pages_of(row);
    int* to = p.out + (size_t)row * topk;
    int place[KEYS];
#pragma unroll
    for (int i = 0; i < KEYS; ++i) place[i] = p.place(pages, max(min(start + i * 32, count - 1), 0));
    if (count <= topk) {
        wait_for_prerequisites();
#pragma unroll
        for (int i = 0; i < KEYS; ++i)
            if (start + i * 32 < end) to[start + i * 32] = place[i];
#pragma unroll 1
        for (int i = count + threadIdx.x; i < topk; i += WARPS * 32) to[i] = -1;
        return;
    }
    bool is_real = !p.warms;
#pragma unroll 1
    for (;; is_real = true) {
#pragma unroll 1
        for (int i = threadIdx.x; i < ROUNDS * BINS; i += WARPS * 32) s.bins[i] = 0;
        if (is_real) wait_for_prerequisites();
        const float* from = is_real ? p.scores + row * p.stride : (const float*)(p.positions + row);
        uint32_t key[KEYS], least = ~0u, largest = 0;   // 0, below every score's, beyond the last
#pragma unroll
        for (int i = 0; i < KEYS; ++i)
            key[i] = __float_as_uint(__ldcg(from + (is_real ? min(start + i * 32, count - 1) : 0)));
#pragma unroll
        for (int i = 0; i < KEYS; ++i) {
            const bool is_one = start + i * 32 < end;
            key[i] = is_one ? order(__uint_as_float(key[i])) : 0;
            least = min(least, is_one ? key[i] : ~0u);
            largest = max(largest, key[i]);
        }
        least = __reduce_min_sync(~0u, least);
        largest = __reduce_max_sync(~0u, largest);
        if (lane == 0) {
            s.least[warp] = least;
            s.largest[warp] = largest;
        }
        __syncthreads();
        Search search(__reduce_min_sync(~0u, s.least[lane % WARPS]),
                      __reduce_max_sync(~0u, s.largest[lane % WARPS]), topk);
#pragma unroll 1
        for (uint32_t* bins = s.bins;; bins += BINS) {
#pragma unroll
            for (int i = 0; i < KEYS; ++i) search.count(key[i], bins);
            __syncthreads();
            if (warp == 0) find(bins, search.need, &s.found);
            __syncthreads();
            if (search.narrow(s.found.bin, s.found.above, s.found.inside)) break;
        }
        uint32_t mine = 0;   // of this warp: larger ones, and from bit 16 on equal ones
#pragma unroll
        for (int i = 0; i < KEYS; ++i) mine += (key[i] > search.low) + ((key[i] == search.low) << 16);
        mine = __reduce_add_sync(~0u, mine);
        if (lane == 0) s.tallies[warp] = mine;
        __syncthreads();
        const uint32_t tally = lane < WARPS ? s.tallies[lane] : 0;
        const uint32_t all = __reduce_add_sync(~0u, tally),
                       before = __reduce_add_sync(~0u, lane < warp ? tally : 0);
        const uint32_t need = topk - (all & 0xFFFF),
                       below = (1u << lane) - 1;   // of those equal to it, the first so many
        uint32_t larger = before & 0xFFFF, equal = before >> 16;
#pragma unroll
        for (int i = 0; i < KEYS; ++i) {
            const bool is_more = key[i] > search.low, is_same = key[i] == search.low;
            const uint32_t more = __ballot_sync(~0u, is_more), same = __ballot_sync(~0u, is_same),
                           ties = equal + __popc(same & below);
            if (is_real && (is_more || (is_same && ties < need)))
                to[larger + __popc(more & below) + min(ties, need)] = place[i];
            larger += __popc(more);
            equal += __popc(same);
        }
        if (is_real) return;
    }
}

template <int WARPS, int KEYS>
__global__ void __launch_bounds__(WARPS * 32) select_few_kernel(const Choice p) {
    launch_dependents();
    const int row = blockIdx.x, count = p.count(row);
    if (count > p.most) wait_for_prerequisites();
    else choose_few<WARPS, KEYS>(p, *(Few*)shared_memory(), row, count);
}

// A long row is shared by a cluster of blocks, each with its part of the keys in shared memory.
struct Many {
    uint32_t bins[ROUNDS * BINS];   // of all blocks
    uint32_t own[BINS];
    uint32_t least, largest;   // of all blocks
    uint32_t parts[CLUSTER][2], warps[32][2];
    Found found;
    uint32_t padding;
};

// `ALL`: rows of few entries too. Without, it takes half of the registers, so that two blocks are resident.
template <bool ALL> __global__ void __launch_bounds__(THREADS) select_many_kernel(const Choice p) {
    Many& s = *(Many*)shared_memory();
    uint32_t* keys = (uint32_t*)(&s + 1);
    launch_dependents();
    const int row = blockIdx.x / CLUSTER, block = blockIdx.x % CLUSTER, tid = threadIdx.x, warp = tid >> 5,
              lane = tid & 31;
    const float* from = p.scores + row * p.stride;
    const int count = p.count(row), topk = p.topk;
    if (ALL && count <= THREADS * FEW_KEYS) {
        if (block == 0) choose_few<THREADS / 32, FEW_KEYS>(p, *(Few*)shared_memory(), row, count);
        else wait_for_prerequisites();
        return;
    }
    const int* pages = p.pages_of(row);
    int* to = p.out + (size_t)row * topk;
    for (int i = tid; i < ROUNDS * BINS; i += THREADS) s.bins[i] = 0;
    if (tid < BINS) s.own[tid] = 0;
    if (tid < 2 * CLUSTER) s.parts[tid >> 1][tid & 1] = 0;
    if (tid == 0) {
        s.least = ~0u;
        s.largest = 0;
    }
    wait_for_prerequisites();
    if (count < p.fewest) return;   // the same for all blocks of the row
    const int each = (count + CLUSTER - 1) / CLUSTER, start = min(block * each, count),
              mine = min(each, count - start);
    uint32_t least = ~0u, largest = 0;
    for (int first = tid; first < mine; first += THREADS * 8) {
        float v[8];   // eight loads at once: one at a time would wait for each
#pragma unroll
        for (int i = 0; i < 8; ++i)
            v[i] = first + i * THREADS < mine ? __ldcg(from + start + first + i * THREADS) : 0.f;
#pragma unroll
        for (int i = 0; i < 8; ++i)
            if (first + i * THREADS < mine) {
                const uint32_t key = keys[first + i * THREADS] = order(v[i]);
                least = min(least, key);
                largest = max(largest, key);
            }
    }
    // Sums over the block, for warp 0.
    least = __reduce_min_sync(~0u, least);
    largest = __reduce_max_sync(~0u, largest);
    if (lane == 0) {
        s.warps[warp][0] = least;
        s.warps[warp][1] = largest;
    }
    all_sync();   // every block runs, and its bins are empty
    if (warp == 0) {
        least = __reduce_min_sync(~0u, s.warps[lane][0]);
        largest = __reduce_max_sync(~0u, s.warps[lane][1]);
        if (lane < CLUSTER) {
            atomicMin(in_block(&s.least, lane), least);
            atomicMax(in_block(&s.largest, lane), largest);
        }
    }
    all_sync();
    Search search(s.least, s.largest, topk);
    for (uint32_t* bins = s.bins;; bins += BINS) {
        for (int i = tid; i < mine; i += THREADS) search.count(keys[i], s.own);
        __syncthreads();
        if (tid < BINS) {
            const uint32_t n = s.own[tid];
            s.own[tid] = 0;
            if (n)
                for (int b = 0; b < CLUSTER; ++b) atomicAdd(in_block(bins + tid, b), n);
        }
        all_sync();
        if (warp == 0) find(bins, search.need, &s.found);
        __syncthreads();
        if (search.narrow(s.found.bin, s.found.above, s.found.inside)) break;
    }
    // First how many larger and equal ones each block has.
    uint32_t larger = 0, equal = 0;
    for (int i = tid; i < mine; i += THREADS) {
        larger += keys[i] > search.low;
        equal += keys[i] == search.low;
    }
    larger = __reduce_add_sync(~0u, larger);
    equal = __reduce_add_sync(~0u, equal);
    if (lane < 2)
        for (int b = 0; b < CLUSTER; ++b)
            atomicAdd(in_block(&s.parts[block][lane], b), lane ? equal : larger);
    all_sync();
    uint32_t total = 0;
    larger = equal = 0;
    for (int b = 0; b < CLUSTER; ++b) {
        total += s.parts[b][0];
        if (b < block) {
            larger += s.parts[b][0];
            equal += s.parts[b][1];
        }
    }
    const uint32_t need = topk - total;   // of those equal to it, the first so many
    for (int first = 0; first < mine; first += THREADS) {
        const int at = first + tid;
        const uint32_t key = at < mine ? keys[at] : 0;
        const uint32_t is = at >= mine ? 0 : key > search.low ? 1u : key == search.low ? 0x10000u : 0u;
        uint32_t upto = is;
        for (int i = 1; i < 32; i <<= 1) {
            const uint32_t v = __shfl_up_sync(~0u, upto, i);
            if (lane >= i) upto += v;
        }
        if (lane == 31) s.warps[warp][0] = upto;
        __syncthreads();
        const uint32_t sum = s.warps[lane][0], all = __reduce_add_sync(~0u, sum),
                       before = __reduce_add_sync(~0u, lane < warp ? sum : 0) + upto - is;
        const uint32_t rank = larger + (before & 0xFFFF), same = equal + (before >> 16);
        if (is == 1u) to[rank + min(same, need)] = p.place(pages, start + at);
        else if (is && same < need) to[rank + same] = p.place(pages, start + at);
        larger += all & 0xFFFF;
        equal += all >> 16;
        __syncthreads();
    }
}

// What decode_select.py launches.
static_assert(CLUSTER == 8 && THREADS == 1024 && sizeof(Few) == 4496 && sizeof(Many) == 5464);
template __global__ void select_few_kernel<16, 4>(const Choice);
template __global__ void select_few_kernel<32, 8>(const Choice);
template __global__ void select_many_kernel<false>(const Choice);
template __global__ void select_many_kernel<true>(const Choice);
