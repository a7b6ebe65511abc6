// Decode step: on several ranks the all-reduce inside the first half of a hyper-connection (what mhc.mix_open does for one rank), and
// the gather of the logits. exchange.cuh says why they are safe.
#include "exchange.cuh"

constexpr int STREAMS = 4, CHUNK = 32, WIDTH = 32, MIXES = STREAMS * (STREAMS + 2), OPEN_THREADS = STREAMS * CHUNK, GATHER_THREADS = 256;
constexpr int TURNS = 2;   // rows whose numbers lie in shared memory at once

template <typename Act> struct Open {
    Peers peers;
    const float* y;           // [rows][parts][d], this rank's share of the last output; null: the step's tokens begin
    const int* chosen;        // [rows][parts - 1] the experts that made y but for its last part; null: all parts count
    const int64_t* ids;       // [rows]
    const void* table;        // [vocab of this rank][d]
    const float* gate;        // [rows][4]
    const float* comb;        // [rows][4][4]
    Act* streams;             // [rows][4][d]
    const float* fn;          // [mixes][4 * d]
    float* partial;           // [rows][chunks][WIDTH]
    int64_t first_place;      // of this exchange, in each sender's part of an inbox
    int rows, programs, chunks, d, parts, mixes, vocab;
    int first_own, own;       // with `chosen`: what others than these experts of this rank made is left out
    int is_wide;              // the table is float32, else BF16
    uint32_t tag;
};

struct Shared {
    float ranks[TURNS][MAX_RANKS][CHUNK];
    float dots[TURNS][STREAMS][WIDTH];
};

__device__ __forceinline__ float as_float(float v) { return v; }
__device__ __forceinline__ float as_float(__nv_bfloat16 v) { return __bfloat162float(v); }
__device__ __forceinline__ void put(float* p, float v) { *p = v; }
__device__ __forceinline__ void put(__nv_bfloat16* p, float v) { *p = __float2bfloat16_rn(v); }
__device__ __forceinline__ float rounded(float v, float) { return v; }
__device__ __forceinline__ float rounded(float v, __nv_bfloat16) { return __bfloat162float(__float2bfloat16_rn(v)); }

// Sums over a warp of as many numbers as it has lanes: lane i ends with that of number i, in v[0].
template <int HALF> __device__ __forceinline__ void fold(float (&v)[WIDTH], int lane) {
    const bool is_upper = lane & HALF;
#pragma unroll
    for (int i = 0; i < HALF; ++i) {
        const float kept = is_upper ? v[i + HALF] : v[i], sent = is_upper ? v[i] : v[i + HALF];
        v[i] = kept + __shfl_xor_sync(~0u, sent, HALF);
    }
    if constexpr (HALF > 1) fold<HALF / 2>(v, lane);
}

// This rank's share of a row's channel: of the last output, or of the embedding, which one rank has.
template <typename Act> __device__ __forceinline__ float own_share(const Open<Act>& p, int row, int c) {
    if (p.y) {
        constexpr int FLIGHT = 8;
        const float* y = p.y + (size_t)row * p.parts * p.d + c;
        float v[FLIGHT], sum = 0.f;
        for (int first = 0; first < p.parts; first += FLIGHT) {
#pragma unroll
            for (int i = 0; i < FLIGHT; ++i) v[i] = first + i < p.parts ? __ldcg(y + (size_t)(first + i) * p.d) : 0.f;
            if (p.chosen)   // what lies there is of an older step
#pragma unroll
                for (int i = 0; i < FLIGHT; ++i)
                    if (first + i < p.parts - 1 && (uint32_t)(__ldcg(p.chosen + row * (p.parts - 1) + first + i) - p.first_own) >= (uint32_t)p.own) v[i] = 0.f;
#pragma unroll
            for (int i = 0; i < FLIGHT; ++i) sum += v[i];
        }
        return sum;
    }
    // A row whose last logits were not finite goes on with id -1 until the host hears of it.
    const int64_t id = __ldcg(p.ids + row), at = (id < 0 ? 0 : id) - (int64_t)p.peers.rank * p.vocab;
    if (at < 0 || at >= p.vocab) return 0.f;
    const float v = p.is_wide ? static_cast<const float*>(p.table)[at * p.d + c] : as_float(static_cast<const __nv_bfloat16*>(p.table)[at * p.d + c]);
    return rounded(v, Act());
}

// A warp is a stream, a lane a channel. To and from rank i goes warp i % 4.
template <typename Act> __device__ __forceinline__ void open(const Open<Act>& p, int block, Shared& s) {
    const int chunk = block % p.chunks, first = block / p.chunks, n = threadIdx.x / CHUNK, lane = threadIdx.x % CHUNK;
    const int c = chunk * CHUNK + lane, size = p.peers.size;
    const bool inside = c < p.d;
    float fn[MIXES];
#pragma unroll
    for (int m = 0; m < MIXES; ++m) fn[m] = inside && m < p.mixes ? __ldg(p.fn + ((size_t)m * STREAMS + n) * p.d + c) : 0.f;
    // The step's first launch triggers late, so that those after it may read what is older than the step before they wait.
    if (p.y) launch_dependents();
    wait_for_prerequisites();
    if (!p.y) launch_dependents();
    float mine = 0.f;
    for (int row = first; row < p.rows; row += p.programs) {
        mine = inside ? own_share(p, row, c) : 0.f;
        for (int i = n; i < size; i += STREAMS)
            if (inside && i != p.peers.rank) push(p.peers.inbox[i] + p.first_place + (size_t)row * p.d + c, mine, p.tag);
    }
    int turn = 0;
    for (int row = first; row < p.rows; row += p.programs, turn ^= 1) {
        Act* streams = p.streams + (size_t)row * STREAMS * p.d + c;
        if (inside && p.rows > p.programs) mine = own_share(p, row, c);
        float old[STREAMS], comb[STREAMS], gate = 0.f;
#pragma unroll
        for (int j = 0; j < STREAMS; ++j) {
            old[j] = inside && p.y ? as_float(streams[(size_t)j * p.d]) : 0.f;
            comb[j] = p.y ? __ldcg(p.comb + (row * STREAMS + j) * STREAMS + n) : 0.f;
        }
        if (p.y) gate = __ldcg(p.gate + row * STREAMS + n);
        constexpr int EACH = MAX_RANKS / STREAMS;
        uint64_t packet[EACH];   // asked for together
        uint64_t* own = p.peers.own + p.first_place + (size_t)row * p.d + c;
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            const int sender = n + i * STREAMS;
            packet[i] = inside && sender < size && sender != p.peers.rank ? get_packet(own + sender * p.peers.places) : 0;
        }
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            const int sender = n + i * STREAMS;
            if (sender >= size) continue;
            float v = mine;
            if (inside && sender != p.peers.rank) v = take(packet[i], own + sender * p.peers.places, p.tag, p.peers, sender);
            s.ranks[turn][sender][lane] = v;
        }
        __syncthreads();   // the ranks' numbers are there, and all have read the streams
        const float y = sum_ranks(&s.ranks[turn][0][lane], CHUNK, size);
        float now = y;
        if (p.y) {
            float mixed = 0.f;
#pragma unroll
            for (int j = 0; j < STREAMS; ++j) mixed += comb[j] * old[j];
            now = gate * rounded(y, Act()) + mixed;
        }
        now = inside ? rounded(now, Act()) : 0.f;
        if (inside) put(streams + (size_t)n * p.d, now);
        // The columns of `partial`: four mixes, the squares, the other mixes.
        float v[WIDTH];
#pragma unroll
        for (int i = 0; i < WIDTH; ++i) v[i] = i < STREAMS ? fn[i] * now : i == STREAMS ? now * now : i <= MIXES ? fn[i - 1] * now : 0.f;
        fold<WIDTH / 2>(v, lane);
        s.dots[turn][n][lane] = v[0];
        __syncthreads();
        if (n == 0 && lane <= p.mixes) {
            const float* dots = &s.dots[turn][0][lane];
            p.partial[((size_t)row * p.chunks + chunk) * WIDTH + lane] = (dots[0] + dots[WIDTH]) + (dots[2 * WIDTH] + dots[3 * WIDTH]);
        }
    }
}

struct Gather {
    Peers peers;
    const float* share;    // [rows][count], this rank's logits
    float* logits;         // [rows][size][count]
    int64_t first_place;
    int rows, count, blocks;
    uint32_t tag;
};

__device__ __forceinline__ void gather(const Gather& p, int block, int threads) {
    launch_dependents();
    wait_for_prerequisites();
    const int size = p.peers.size;
    const int64_t total = (int64_t)p.rows * p.count, step = (int64_t)p.blocks * threads, start = (int64_t)block * threads + threadIdx.x;
    for (int64_t i = start; i < total; i += step) {
        const float v = __ldcg(p.share + i);
        for (int to = 0; to < size; ++to)
            if (to != p.peers.rank) push(p.peers.inbox[to] + p.first_place + i, v, p.tag);
        p.logits[(i / p.count * size + p.peers.rank) * p.count + i % p.count] = v;
    }
    for (int64_t i = start; i < total * (size - 1); i += step) {
        const int other = (int)(i / total), sender = other + (other >= p.peers.rank);
        const int64_t at = i % total;
        uint64_t* own = p.peers.own + sender * p.peers.places + p.first_place + at;
        p.logits[(at / p.count * size + sender) * p.count + at % p.count] = take(get_packet(own), own, p.tag, p.peers, sender);
    }
}

#ifdef __CUDACC__
// Four blocks on a multiprocessor: exchange.py launches no more.
template <typename Act> __global__ void __launch_bounds__(OPEN_THREADS, 4) open_kernel(const __grid_constant__ Open<Act> p) {
    __shared__ Shared s;
    open(p, blockIdx.x, s);
}
__global__ void __launch_bounds__(GATHER_THREADS, 2) gather_kernel(const __grid_constant__ Gather p) { gather(p, blockIdx.x, GATHER_THREADS); }

template __global__ void open_kernel<float>(const __grid_constant__ Open<float>);
template __global__ void open_kernel<__nv_bfloat16>(const __grid_constant__ Open<__nv_bfloat16>);
#endif
