// Decode step: the first half of a hyper-connection. The last output goes into the streams, or the step's
// tokens begin them; then the streams are multiplied with `fn`, CHUNK channels of each a block (decode_mix.cu
// adds up). On several ranks (IS_SHARED) each has a share of the output and the blocks do the all-reduce, of
// embeddings too; exchange.cuh says why that is safe.
#include "exchange.cuh"

constexpr int STREAMS = 4, CHUNK = 32, WIDTH = 32, MIXES = STREAMS * (STREAMS + 2), THREADS = STREAMS * CHUNK;
constexpr int OWN = MIXES / STREAMS;   // mixes that a warp multiplies
constexpr int TURNS = 2;               // rows whose numbers lie in shared memory at once
constexpr int FLIGHT = 8;              // parts of an output that are asked for together

template <typename Act> struct Open {
    Peers peers;
    const void* y;   // [rows][parts][d], this rank's share of the last output
    const int*
        chosen;   // [rows][parts - 1] the experts that made y but for its last part; null: all parts count
    const int64_t* ids;    // [rows]
    const void* table;     // [vocab of this rank][d]
    const float* gate;     // [rows][4]
    const float* comb;     // [rows][4][4]
    Act* streams;          // [rows][4][d]
    const float* fn;       // [mixes][4 * d]
    float* partial;        // [rows][chunks][WIDTH]: four mixes, the squares, the other mixes
    int64_t first_place;   // of this exchange, in each sender's part of an inbox
    int rows, programs, chunks, d, parts, mixes, vocab;
    int first_own, own;   // with `chosen`: what others than these experts of this rank made is left out
    int is_wide;          // the table is float32, else BF16
    uint32_t tag;
};

struct Shared {
    float ranks[TURNS][MAX_RANKS][CHUNK];
};

#ifdef __CUDACC__
// Predicated: a row's loads are in flight together, which a condition in C++ turns into branches. What is not
// there is zero.
__device__ __forceinline__ float load_weight(const float* from, bool is_there) {
    float v = 0.f;
    asm volatile("{\n.reg .pred p;\nsetp.ne.s32 p, %2, 0;\n@p ld.global.f32 %0, [%1];\n}"
                 : "+f"(v)
                 : "l"(from), "r"((int)is_there));
    return v;
}
__device__ __forceinline__ float load(const float* from, bool is_there) {
    float v = 0.f;
    asm volatile("{\n.reg .pred p;\nsetp.ne.s32 p, %2, 0;\n@p ld.global.f32 %0, [%1];\n}"
                 : "+f"(v)
                 : "l"(from), "r"((int)is_there)
                 : "memory");
    return v;
}
__device__ __forceinline__ __nv_bfloat16 load(const __nv_bfloat16* from, bool is_there) {
    __nv_bfloat16 v = {0};
    asm volatile("{\n.reg .pred p;\nsetp.ne.s32 p, %2, 0;\n@p ld.global.u16 %0, [%1];\n}"
                 : "+h"(v.bits)
                 : "l"(from), "r"((int)is_there)
                 : "memory");
    return v;
}
__device__ __forceinline__ void load_four(const float* from, float (&to)[STREAMS]) {
    asm volatile("ld.global.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(to[0]), "=f"(to[1]), "=f"(to[2]), "=f"(to[3])
                 : "l"(from)
                 : "memory");
}
__device__ __forceinline__ void store(float* to, float v, bool is_there) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.s32 p, %2, 0;\n@p st.global.f32 [%0], %1;\n}" ::"l"(to), "f"(v),
                 "r"((int)is_there)
                 : "memory");
}
__device__ __forceinline__ void store(__nv_bfloat16* to, float v, bool is_there) {
    const uint16_t bits = (uint16_t)(__float_as_uint(v) >> 16);   // rounded already
    asm volatile("{\n.reg .pred p;\nsetp.ne.s32 p, %2, 0;\n@p st.global.u16 [%0], %1;\n}" ::"l"(to),
                 "h"(bits), "r"((int)is_there)
                 : "memory");
}
#endif
__device__ __forceinline__ float as_float(float v) { return v; }
__device__ __forceinline__ float as_float(__nv_bfloat16 v) { return __bfloat162float(v); }
// Rounded as the streams are, two at a time: a single number takes another, slower instruction.
__device__ __forceinline__ void round_both(float&, float&, float) {}
__device__ __forceinline__ void round_both(float& low, float& high, __nv_bfloat16) {
    const uint32_t both = __floats2bfloat162_rn(low, high).bits;
    low = __uint_as_float(both << 16);
    high = __uint_as_float(both & 0xFFFF0000u);
}

// Sums over a warp of eight numbers: lane i ends with that of number i % 8, in v[0].
__device__ __forceinline__ void fold(float (&v)[8], int lane) {
#pragma unroll
    for (int half = 4; half; half >>= 1) {
        const bool is_upper = lane & half;
#pragma unroll
        for (int i = 0; i < half; ++i) {
            const float kept = is_upper ? v[i + half] : v[i], sent = is_upper ? v[i] : v[i + half];
            v[i] = kept + __shfl_xor_sync(~0u, sent, half);
        }
    }
    v[0] += __shfl_xor_sync(~0u, v[0], 8);
    v[0] += __shfl_xor_sync(~0u, v[0], 16);
}

// What a lane knows of its channel of a row. An output is of type Y and goes into streams that are there
// already.
template <typename Act, typename Y> struct Row {
    static constexpr bool BEGINS = false;
    const Y* y;
    const float *gate_at, *comb_at;
    const Act* streams;
    Act old[STREAMS];   // as it is stored: who converts it waits for it
    float comb[STREAMS][STREAMS], gate[STREAMS];

    __device__ __forceinline__ Row(const Open<Act>& p, int row, int c)
        : y(static_cast<const Y*>(p.y) + row * p.parts * p.d + c),
          gate_at(p.gate + row * STREAMS),
          comb_at(p.comb + row * STREAMS * STREAMS),
          streams(p.streams + row * STREAMS * p.d + c) {}
    __device__ __forceinline__ void read(int d, bool is_inside) {
        load_four(gate_at, gate);
#pragma unroll
        for (int j = 0; j < STREAMS; ++j) load_four(comb_at + j * STREAMS, comb[j]);
#pragma unroll
        for (int j = 0; j < STREAMS; ++j) old[j] = load(streams + j * d, is_inside);
    }
    // This rank's share of the output.
    __device__ __forceinline__ float share(const Open<Act>& p, int row, bool is_inside) const {
        float sum = 0.f;
        int first = 0;
        do {
            Y v[FLIGHT];
#pragma unroll
            for (int i = 0; i < FLIGHT; ++i)
                v[i] = load(y + (first + i) * p.d, is_inside && first + i < p.parts);
            if (sizeof(Y) == sizeof(float) &&
                p.chosen) {   // what lies where another rank's expert was chosen is of an older step
                const int part = first + threadIdx.x % FLIGHT;
                const bool is_own = part >= p.parts - 1 ||
                                    (uint32_t)(__ldcg(p.chosen + row * (p.parts - 1) + part) - p.first_own) <
                                        (uint32_t)p.own;
                const uint32_t counts = __ballot_sync(~0u, is_own);
#pragma unroll
                for (int i = 0; i < FLIGHT; ++i) v[i] = counts >> i & 1 ? v[i] : Y();
            }
#pragma unroll
            for (int i = 0; i < FLIGHT; ++i) sum += as_float(v[i]);
            first += FLIGHT;
        } while (first < p.parts);
        return sum;
    }
    // Beyond the row all is zero; a gate or comb that is not finite spoils the row's streams there as
    // everywhere.
    __device__ __forceinline__ void mix(float out, float (&now)[STREAMS]) const {
        float nothing = 0.f;
        round_both(out, nothing, Act());
#pragma unroll
        for (int n = 0; n < STREAMS; ++n) {
            float mixed = 0.f;
#pragma unroll
            for (int j = 0; j < STREAMS; ++j) mixed += comb[j][n] * as_float(old[j]);
            now[n] = gate[n] * out + mixed;
        }
        round_both(now[0], now[1], Act());
        round_both(now[2], now[3], Act());
    }
};

// The step's tokens: every stream is the token's row, which one rank has.
struct Token {};
template <typename Act> struct Row<Act, Token> {
    static constexpr bool BEGINS = true;
    int c;

    __device__ __forceinline__ Row(const Open<Act>&, int, int c) : c(c) {}
    __device__ __forceinline__ void read(int, bool) {}
    __device__ __forceinline__ float share(const Open<Act>& p, int row, bool is_inside) const {
        // A row whose last logits were not finite goes on with id -1 until the host hears of it.
        const int64_t id = __ldcg(p.ids + row), at = (id < 0 ? 0 : id) - (int64_t)p.peers.rank * p.vocab;
        const bool is_there = is_inside && at >= 0 && at < p.vocab;
        float nothing = 0.f,
              v = p.is_wide
                      ? load(static_cast<const float*>(p.table) + at * p.d + c, is_there)
                      : as_float(load(static_cast<const __nv_bfloat16*>(p.table) + at * p.d + c, is_there));
        round_both(v, nothing, Act());
        return v;
    }
    __device__ __forceinline__ void mix(float out, float (&now)[STREAMS]) const {
#pragma unroll
        for (int n = 0; n < STREAMS; ++n) now[n] = out;
    }
};

// All ranks' shares of a row's channel, added up; `mine` is pushed already. To and from rank i goes warp i
// % 4.
template <typename Act>
__device__ __forceinline__ float reduce(const Open<Act>& p, float mine, int row, int c, bool is_inside,
                                        float (&ranks)[MAX_RANKS][CHUNK]) {
    const int warp = threadIdx.x / CHUNK, lane = threadIdx.x % CHUNK, size = p.peers.size;
    uint64_t* own = p.peers.own + p.first_place + row * p.d + c;
    uint64_t packet[MAX_RANKS / STREAMS];   // asked for together
#pragma unroll
    for (int i = 0; i < MAX_RANKS / STREAMS; ++i) {
        const int sender = warp + i * STREAMS;
        packet[i] = is_inside && sender < size && sender != p.peers.rank
                        ? get_packet(own + sender * p.peers.places)
                        : 0;
    }
#pragma unroll 1
    for (int sender = warp; sender < size; sender += STREAMS) {
        float v = mine;
        if (is_inside && sender != p.peers.rank)
            v = take(sender < STREAMS ? packet[0] : packet[1], own + sender * p.peers.places, p.tag, p.peers,
                     sender);
        ranks[sender][lane] = v;
    }
    __syncthreads();
    return sum_ranks(&ranks[0][lane], CHUNK, size);
}

// A lane is a channel. A warp makes all streams of it, stores one, and multiplies them with its mixes: no sum
// crosses warps.
template <typename Act, typename Y, bool IS_SHARED>
__device__ __forceinline__ void open(const Open<Act>& p, int block, Shared& s) {
    typedef Row<Act, Y> Its;
    const int warp = threadIdx.x / CHUNK, lane = threadIdx.x % CHUNK, mix = warp * OWN;
    int chunk = block, first = 0;
#pragma unroll 1
    for (; chunk >= p.chunks; chunk -= p.chunks) ++first;   // few times; a division is longer
    int last = first;
#pragma unroll 1
    for (; IS_SHARED && last + p.programs < p.rows; last += p.programs) {}
    const int c = chunk * CHUNK + lane;
    const bool is_inside = c < p.d;
    float fn[OWN][STREAMS];
#pragma unroll
    for (int i = 0; i < OWN; ++i)
#pragma unroll
        for (int n = 0; n < STREAMS; ++n)
            fn[i][n] = load_weight(p.fn + ((mix + i) * STREAMS + n) * p.d + c,
                                   is_inside && mix + i < p.mixes);
    const int column = lane == OWN ? STREAMS : mix + lane + (mix + lane >= STREAMS);
    const bool has_column = lane < OWN ? mix + lane < p.mixes : lane == OWN && warp == 0;
    float* partial = p.partial + chunk * WIDTH + column;
    Its its(p, first, c);
    // The step's first launch triggers late, so that those after it may read what is older than the step
    // before they wait.
    if (!Its::BEGINS) launch_dependents();
    wait_for_prerequisites();
    if (Its::BEGINS) launch_dependents();
    float mine = 0.f;
    if (IS_SHARED) {
        its.read(p.d, is_inside);
        // All is pushed before anything is taken; the first row last, since it goes on.
#pragma unroll 1
        for (int row = last; row >= first; row -= p.programs) {
            mine = Its(p, row, c).share(p, row, is_inside);
#pragma unroll 1
            for (int to = warp; to < p.peers.size; to += STREAMS)
                if (is_inside && to != p.peers.rank)
                    push(p.peers.inbox[to] + p.first_place + row * p.d + c, mine, p.tag);
        }
    }
    for (int row = first, turn = 0;; turn ^= 1) {
        if (!IS_SHARED) {
            its.read(p.d, is_inside);
            mine = its.share(p, row, is_inside);
        }
        float now[STREAMS], v[8] = {};
        its.mix(IS_SHARED ? reduce(p, mine, row, c, is_inside, s.ranks[turn]) : mine, now);
#pragma unroll
        for (int n = 0; n < STREAMS; ++n) {
#pragma unroll
            for (int i = 0; i < OWN; ++i) v[i] += fn[i][n] * now[n];
            v[OWN] += now[n] * now[n];
        }
        Act* stream = p.streams + (row * STREAMS + warp) * p.d + c;
        if (!IS_SHARED && !Its::BEGINS) __syncthreads();   // all have read the streams
        store(stream, warp & 2 ? (warp & 1 ? now[3] : now[2]) : (warp & 1 ? now[1] : now[0]), is_inside);
        fold(v, lane);
        store(partial + row * p.chunks * WIDTH, v[0], has_column);
        row += p.programs;
        if (row >= p.rows) break;
        its = Its(p, row, c);
        if (IS_SHARED) {
            its.read(p.d, is_inside);
            mine = its.share(p, row, is_inside);
        }
    }
}

#ifdef __CUDACC__
// Blocks that a multiprocessor surely holds: decode.py launches no more, since ranks wait for each other's
// blocks.
constexpr int SHARED_BLOCKS = 4, BLOCKS = 6;
// IS_WIDE: the output is float32, else as wide as the streams.
template <typename Act, bool IS_WIDE> struct Output {
    typedef float Type;
};
template <typename Act> struct Output<Act, false> {
    typedef Act Type;
};
template <typename Act, bool IS_WIDE, bool IS_SHARED>
__global__ void __launch_bounds__(THREADS, IS_SHARED ? SHARED_BLOCKS : BLOCKS)
    open_kernel(const __grid_constant__ Open<Act> p) {
    __shared__ Shared s;
    open<Act, typename Output<Act, IS_WIDE>::Type, IS_SHARED>(p, blockIdx.x, s);
}
template <typename Act, bool IS_SHARED>
__global__ void __launch_bounds__(THREADS, IS_SHARED ? SHARED_BLOCKS : BLOCKS)
    embed_kernel(const __grid_constant__ Open<Act> p) {
    __shared__ Shared s;
    open<Act, Token, IS_SHARED>(p, blockIdx.x, s);
}

template __global__ void open_kernel<float, true, false>(const __grid_constant__ Open<float>);
template __global__ void open_kernel<float, true, true>(const __grid_constant__ Open<float>);
template __global__ void open_kernel<__nv_bfloat16, false, false>(
    const __grid_constant__ Open<__nv_bfloat16>);
template __global__ void open_kernel<__nv_bfloat16, true, false>(const __grid_constant__ Open<__nv_bfloat16>);
template __global__ void open_kernel<__nv_bfloat16, true, true>(const __grid_constant__ Open<__nv_bfloat16>);
template __global__ void embed_kernel<float, false>(const __grid_constant__ Open<float>);
template __global__ void embed_kernel<float, true>(const __grid_constant__ Open<float>);
template __global__ void embed_kernel<__nv_bfloat16, false>(const __grid_constant__ Open<__nv_bfloat16>);
template __global__ void embed_kernel<__nv_bfloat16, true>(const __grid_constant__ Open<__nv_bfloat16>);
#endif
