// Decode step: which entries to attend to, one block or cluster per row. Serves prompts too.
#include "cluster.cuh"
#include "order.cuh"

constexpr int CLUSTER = 8, THREADS = 1024;   // of a long row

// The `topk` largest of a row's first `count` scores, the lower index on a tie, in rising order, as places in the pool;
// -1 beyond. The key of the last one taken is found two bits at a time by counting.
struct Choice {
    const float* scores;        // [rows][stride]
    int64_t stride;
    const int64_t* positions;   // [rows]
    int ratio;
    const int* page_table;      // [slots][pages]
    const int64_t* slots;       // [rows]
    int pages, page_entries, topk;
    int fewest, most;           // entries of a row that this launch chooses from; other rows are another launch's
    int* out;                   // [rows][topk]

    __device__ __forceinline__ int count(int row) const { return (int)((__ldcg(positions + row) + 1) / ratio); }
    __device__ __forceinline__ const int* pages_of(int row) const { return page_table + __ldcg(slots + row) * pages; }
    __device__ __forceinline__ int place(const int* table, int entry) const {
        return table[entry / page_entries] * page_entries + entry % page_entries;
    }
};

// t1, t2 and t3 keys are at least one, two and three: the largest of these that is no larger than the topk'th key becomes the
// prefix. True when it is found early: then exactly the wanted keys are larger than the prefix.
__device__ __forceinline__ bool narrow(uint32_t& prefix, uint32_t one, uint32_t two, uint32_t three, uint32_t t1, uint32_t t2, uint32_t t3,
                                       int topk) {
    const uint32_t reached = t3 >= topk ? t3 : t2 >= topk ? t2 : t1;
    if (t3 >= topk) prefix = three;
    else if (t2 >= topk) prefix = two;
    else if (t1 >= topk) prefix = one;
    else return false;
    if (reached != topk) return false;
    --prefix;
    return true;
}

// A row of few entries is one block's: a warp has KEYS * 32 of them in a row, a lane KEYS of those in registers.
template <int WARPS, int KEYS>
__global__ void __launch_bounds__(WARPS * 32) select_few_kernel(const Choice p) {
    constexpr int PAGES = 256;   // of a row, held in shared memory if no more
    __shared__ uint2 tallies[2][WARPS];
    __shared__ int table[PAGES];
    launch_dependents();
    const int row = blockIdx.x, warp = threadIdx.x >> 5, lane = threadIdx.x & 31, start = warp * KEYS * 32 + lane;
    const int count = p.count(row), topk = p.topk;
    const int* pages = p.pages_of(row);
    if (p.pages <= PAGES) {
        for (int i = threadIdx.x; i < p.pages; i += WARPS * 32) table[i] = __ldcg(pages + i);
        pages = table;
    }
    int* to = p.out + (size_t)row * topk;
    wait_for_prerequisites();
    if (count > p.most) return;
    __syncthreads();
    if (count <= topk) {
        for (int i = threadIdx.x; i < topk; i += WARPS * 32) to[i] = i < count ? p.place(pages, i) : -1;
        return;
    }
    uint32_t key[KEYS];   // 0, below every score's, beyond the last
#pragma unroll
    for (int i = 0; i < KEYS; ++i) key[i] = start + i * 32 < count ? __float_as_uint(__ldcg(p.scores + row * p.stride + start + i * 32)) : 0;
#pragma unroll
    for (int i = 0; i < KEYS; ++i) key[i] = start + i * 32 < count ? max(order(__uint_as_float(key[i])), 1u) : 0;
    // Sums over the block of two numbers that fit 16 bits, and a third.
    int turn = 0;
    const auto everywhere = [&](uint32_t two, uint32_t third) {
        two = __reduce_add_sync(~0u, two);
        third = __reduce_add_sync(~0u, third);
        if (lane == 0) tallies[turn & 1][warp] = make_uint2(two, third);
        __syncthreads();
        uint2 total = make_uint2(0, 0);
#pragma unroll
        for (int w = 0; w < WARPS; ++w) {
            const uint2 of = tallies[turn & 1][w];
            total.x += of.x; total.y += of.y;
        }
        ++turn;
        return total;
    };
    uint32_t prefix = 0;
    for (int digit = 0; digit < 16; ++digit) {
        const int shift = 30 - 2 * digit;
        const uint32_t one = prefix | 1u << shift, two = prefix | 2u << shift, three = prefix | 3u << shift;
        uint32_t low = 0, high = 0;
#pragma unroll
        for (int i = 0; i < KEYS; ++i) { low += (key[i] >= one) + ((key[i] >= two) << 16); high += key[i] >= three; }
        const uint2 tally = everywhere(low, high);
        const uint32_t t1 = tally.x & 0xFFFF, t2 = tally.x >> 16, t3 = tally.y;
        if (narrow(prefix, one, two, three, t1, t2, t3, topk)) break;
    }
    // prefix is now the key of the last one taken, or less than that of any wanted one.
    uint32_t mine = 0;   // of this warp: larger ones, and from bit 16 on equal ones
#pragma unroll
    for (int i = 0; i < KEYS; ++i) mine += (key[i] > prefix) + ((key[i] == prefix) << 16);
    mine = __reduce_add_sync(~0u, mine);
    if (lane == 0) tallies[turn & 1][warp].x = mine;
    __syncthreads();
    uint32_t before = 0, all = 0;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) {
        const uint32_t of = tallies[turn & 1][w].x;
        before += w < warp ? of : 0;
        all += of;
    }
    const uint32_t need = topk - (all & 0xFFFF), below = (1u << lane) - 1;   // of those equal to it, the first so many
    uint32_t larger = before & 0xFFFF, equal = before >> 16;
#pragma unroll
    for (int i = 0; i < KEYS; ++i) {
        const uint32_t more = __ballot_sync(~0u, key[i] > prefix), same = __ballot_sync(~0u, key[i] == prefix);
        const uint32_t rank = larger + __popc(more & below), ties = equal + __popc(same & below);
        if (more >> lane & 1) to[rank + min(ties, need)] = p.place(pages, start + i * 32);
        else if ((same >> lane & 1) && ties < need) to[rank + ties] = p.place(pages, start + i * 32);
        larger += __popc(more);
        equal += __popc(same);
    }
}

// A long row is shared by a cluster of blocks, each with its part of the keys in shared memory.
__device__ __forceinline__ void add_in(uint32_t address, uint32_t v) {
    asm volatile("red.relaxed.cluster.shared::cluster.add.u32 [%0], %1;" ::"r"(address), "r"(v) : "memory");
}

__global__ void __launch_bounds__(THREADS) select_many_kernel(const Choice p) {
    extern __shared__ uint32_t keys[];
    __shared__ uint32_t tallies[16][3], parts[CLUSTER][2], warp_sum[32];
    launch_dependents();
    const int row = blockIdx.x / CLUSTER, block = blockIdx.x % CLUSTER, tid = threadIdx.x, warp = tid >> 5, lane = tid & 31;
    const float* s = p.scores + row * p.stride;
    const int count = p.count(row), topk = p.topk;
    const int* pages = p.pages_of(row);
    int* to = p.out + (size_t)row * topk;
    wait_for_prerequisites();
    if (count < p.fewest) return;   // the same for all blocks of the row
    if (count <= topk) {
        for (int i = block * THREADS + tid; i < topk; i += THREADS * CLUSTER) to[i] = i < count ? p.place(pages, i) : -1;
        return;
    }
    const int each = (count + CLUSTER - 1) / CLUSTER, start = min(block * each, count), mine = min(each, count - start);
    for (int first = tid; first < mine; first += THREADS * 8) {
        float v[8];   // eight loads at once: one at a time would wait for each
#pragma unroll
        for (int i = 0; i < 8; ++i) v[i] = first + i * THREADS < mine ? __ldcg(s + start + first + i * THREADS) : 0.f;
#pragma unroll
        for (int i = 0; i < 8; ++i)
            if (first + i * THREADS < mine) keys[first + i * THREADS] = order(v[i]);
    }
    if (tid < 48) tallies[tid / 3][tid % 3] = 0;
    all_sync();
    uint32_t prefix = 0;
    for (int digit = 0; digit < 16; ++digit) {
        const int shift = 30 - 2 * digit;
        const uint32_t one = prefix | 1u << shift, two = prefix | 2u << shift, three = prefix | 3u << shift;
        uint32_t n1 = 0, n2 = 0, n3 = 0;
        for (int i = tid; i < mine; i += THREADS) {
            const uint32_t key = keys[i];
            n1 += key >= one; n2 += key >= two; n3 += key >= three;
        }
        n1 = __reduce_add_sync(~0u, n1); n2 = __reduce_add_sync(~0u, n2); n3 = __reduce_add_sync(~0u, n3);
        if (lane < 3) {
            const uint32_t n = lane == 0 ? n1 : lane == 1 ? n2 : n3;
            for (int b = 0; b < CLUSTER; ++b) add_in(address_in(&tallies[digit][lane], b), n);
        }
        all_sync();
        const volatile uint32_t* tally = tallies[digit];
        const uint32_t t3 = tally[2], t2 = tally[1], t1 = tally[0];
        if (narrow(prefix, one, two, three, t1, t2, t3, topk)) break;
    }
    // As above. First how many larger and equal ones each block has.
    uint32_t larger = 0, equal = 0;
    for (int i = tid; i < mine; i += THREADS) { larger += keys[i] > prefix; equal += keys[i] == prefix; }
    larger = __reduce_add_sync(~0u, larger); equal = __reduce_add_sync(~0u, equal);
    if (tid < 2 * CLUSTER) parts[tid >> 1][tid & 1] = 0;
    all_sync();
    if (lane < 2)
        for (int b = 0; b < CLUSTER; ++b) add_in(address_in(&parts[block][lane], b), lane ? equal : larger);
    all_sync();
    uint32_t total = 0;
    larger = equal = 0;
    for (int b = 0; b < CLUSTER; ++b) {
        total += parts[b][0];
        if (b < block) { larger += parts[b][0]; equal += parts[b][1]; }
    }
    const uint32_t need = topk - total;   // of those equal to it, the first so many
    for (int first = 0; first < mine; first += THREADS) {
        const int at = first + tid;
        const uint32_t key = at < mine ? keys[at] : 0;
        const uint32_t is = at >= mine ? 0 : key > prefix ? 1u : key == prefix ? 0x10000u : 0u;
        uint32_t upto = is;
        for (int i = 1; i < 32; i <<= 1) {
            const uint32_t v = __shfl_up_sync(~0u, upto, i);
            if (lane >= i) upto += v;
        }
        if (lane == 31) warp_sum[warp] = upto;
        __syncthreads();
        uint32_t all = lane < THREADS / 32 ? warp_sum[lane] : 0, before = lane < warp ? all : 0;
        all = __reduce_add_sync(~0u, all); before = __reduce_add_sync(~0u, before) + upto - is;
        const uint32_t rank = larger + (before & 0xFFFF), same = equal + (before >> 16);
        if (is == 1u) to[rank + min(same, need)] = p.place(pages, start + at);
        else if (is && same < need) to[rank + same] = p.place(pages, start + at);
        larger += all & 0xFFFF;
        equal += all >> 16;
        __syncthreads();
    }
}

// What choose.py launches.
static_assert(CLUSTER == 8 && THREADS == 1024);
template __global__ void select_few_kernel<8, 5>(const Choice);
template __global__ void select_few_kernel<16, 8>(const Choice);
template __global__ void select_few_kernel<32, 8>(const Choice);
