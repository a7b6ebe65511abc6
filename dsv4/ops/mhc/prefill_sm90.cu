// Prompts: hyper-connections of four streams, two launches a site.
//
// `open_kernel` puts the last output back into the streams and multiplies them with fn while it has them;
// `close_kernel` adds up the parts and makes the next input, normalised, as its products read it. Neither the
// number of rows nor their places enter a sum.
#include "prefill_packed.cuh"

constexpr int STREAMS = 4, MIXES = 2 * STREAMS + STREAMS * STREAMS, SQUARES = MIXES,
              WIDTH = 32;   // columns of `partial`: mixes, squares
constexpr int PART = 256,
              STEP = 32;              // channels of each stream that a block multiplies, and a warp at a time
constexpr int WARPS = 8, ROWS = 16;   // rows of a warp
constexpr int TILES = MIXES / 8, TERMS = 3;   // fn is a sum of three BF16 numbers
// Fragments of fn for sixteen channels: [tile and term][lane], two and two side by side, the last alone.
constexpr int FRAGMENT = TILES * TERMS * 256, FN_BYTES = STREAMS * PART / 16 * FRAGMENT;
constexpr int FACTORS = 1 + STREAMS;   // of a row, four floats each
constexpr int OPEN_BYTES = FN_BYTES + WARPS * ROWS * FACTORS * 16;
static_assert(OPEN_BYTES == 157696);   // prefill_sm90.py counts on it

struct Opening {
    const __nv_bfloat16* y;         // [rows][d]
    const float *gate, *comb;       // [rows][4], [rows][4][4]
    const __nv_bfloat16* streams;   // [rows][4][d], strides of rows and streams
    const float* fn;                // [4 * d][24]
    __nv_bfloat16* out;             // [rows][4][d]
    float* partial;                 // [rows][d / PART][WIDTH]
    int64_t row, stream;
    int rows, d, blocks;   // blocks: of a part
};

#ifdef __CUDACC__   // a twin on the CPU (tests/kernels) has its own
__device__ __forceinline__ void mma_bf16(float (&d)[4], const uint32_t (&a)[4], uint2 b) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b.x), "r"(b.y));
}
// The line's other half is wanted next.
__device__ __forceinline__ uint4 read(const __nv_bfloat16* p) {
    uint4 v;
    asm volatile("ld.global.cg.L2::128B.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p));
    return v;
}
#endif
__device__ __forceinline__ uint32_t word_of(const uint4& v, int i) {
    return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
}

// Two neighbouring channels' rows of fn, four mixes at a time, as the fragments of a warp's products have
// them. Lanes exchange words (below), so of sixteen channels lane t of a quad has four neighbours, from (t &
// 1) * 8 + (t >> 1) * 4 on.
__device__ __forceinline__ void put_fn(const Opening& p, int part, char* shared) {
    constexpr int QUADS = MIXES / 4, ITEMS = STREAMS * PART / 2 * QUADS / (WARPS * 32), AHEAD = 6;
#pragma unroll 1
    for (int begin = 0; begin < ITEMS; begin += AHEAD) {
        float4 v[AHEAD][2];
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
            const int item = (begin + i) * (WARPS * 32) + threadIdx.x, pair = item / QUADS,
                      quad = item % QUADS;
            const int n = pair / (PART / 2), channel = part * PART + pair % (PART / 2) * 2;
            const float4* from = reinterpret_cast<const float4*>(p.fn + ((size_t)n * p.d + channel) * MIXES) +
                                 quad;
            v[i][0] = __ldg(from);
            v[i][1] = __ldg(from + QUADS);
        }
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
            const int item = (begin + i) * (WARPS * 32) + threadIdx.x, pair = item / QUADS,
                      quad = item % QUADS;
            const int t = pair / 4 % 2 + pair / 2 % 2 * 2,
                      word = pair % 2;   // sixteen channels are eight pairs
            const float low[4] = {v[i][0].x, v[i][0].y, v[i][0].z, v[i][0].w},
                        high[4] = {v[i][1].x, v[i][1].y, v[i][1].z, v[i][1].w};
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                const int mix = quad * 4 + k, lane = mix % 8 * 4 + t;
                float a = low[k], b = high[k];
#pragma unroll
                for (int term = 0; term < TERMS; ++term) {
                    const uint32_t both = pack_bf16(a, b);
                    const int at = mix / 8 * TERMS + term;
                    const int place = at < 8 ? at / 2 * 512 + lane * 16 + at % 2 * 8 : 2048 + lane * 8;
                    *reinterpret_cast<uint32_t*>(shared + pair / 8 * FRAGMENT + place + word * 4) = both;
                    a -= __uint_as_float(both << 16);
                    b -= __uint_as_float(both & 0xFFFF0000u);
                }
            }
        }
    }
}

// Sixteen rows of a part's channels, in flight or here: what a lane has of rows g and g+8.
template <bool HAS_Y> struct Batch {
    uint4 v[2][STREAMS + HAS_Y];
};

// The new streams of 32 channels, of rows g and g + 8: `words`, as their products read them; their squares
// are added up.
template <bool HAS_Y>
__device__ __forceinline__ void mix_streams(const Batch<HAS_Y>& in, const float4* factors,
                                            uint32_t (&words)[2][STREAMS][4], float (&square)[2], int g) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        float gate[STREAMS], comb[STREAMS][STREAMS];
        if constexpr (HAS_Y) {
            const float4* its = factors + (g + h * 8) * FACTORS;
            const float4 v = its[0];
            gate[0] = v.x;
            gate[1] = v.y;
            gate[2] = v.z;
            gate[3] = v.w;
#pragma unroll
            for (int m = 0; m < STREAMS; ++m) {
                const float4 v = its[1 + m];
                comb[m][0] = v.x;
                comb[m][1] = v.y;
                comb[m][2] = v.z;
                comb[m][3] = v.w;
            }
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            float2 old[STREAMS];
#pragma unroll
            for (int n = 0; n < STREAMS; ++n) {
                words[h][n][i] = word_of(in.v[h][n], i);
                old[n] = open_bf16(words[h][n][i]);
            }
            if constexpr (HAS_Y) {
                const float2 y = open_bf16(word_of(in.v[h][STREAMS], i));
#pragma unroll
                for (int n = 0; n < STREAMS; ++n) {
                    float2 v = make_float2(comb[0][n] * old[0].x, comb[0][n] * old[0].y);
#pragma unroll
                    for (int m = 1; m < STREAMS; ++m)
                        v = make_float2(fmaf(comb[m][n], old[m].x, v.x), fmaf(comb[m][n], old[m].y, v.y));
                    words[h][n][i] = pack_bf16(fmaf(gate[n], y.x, v.x), fmaf(gate[n], y.y, v.y));
                }
            }
#pragma unroll
            for (int n = 0; n < STREAMS; ++n) {
                const float2 v = open_bf16(words[h][n][i]);
                square[h] = fmaf(v.x, v.x, fmaf(v.y, v.y, square[h]));
            }
        }
    }
}

// A block has one part of the channels and some of the rows, a warp sixteen rows at a time.
template <bool HAS_Y>
__global__ void __launch_bounds__(WARPS * 32, 1) open_kernel(const __grid_constant__ Opening p) {
    extern __shared__ __align__(16) char shared[];
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    const int part = blockIdx.x / p.blocks, parts = p.d / PART, tiles = (p.rows + ROWS - 1) / ROWS;
    const bool is_upper = t >= 2;
    put_fn(p, part, shared);
    __syncthreads();
    wait_for_prerequisites();
    float4* factors = reinterpret_cast<float4*>(shared + FN_BYTES) +
                      warp * (ROWS * FACTORS);   // [row][gate, rows of comb]
    for (int tile = blockIdx.x % p.blocks + warp * p.blocks; tile < tiles; tile += WARPS * p.blocks) {
        const int own[2] = {tile * ROWS + g, tile * ROWS + g + 8}, last = p.rows - 1;
        uint32_t from[2];   // of a row, eight channels at a time: registers are short
#pragma unroll
        for (int h = 0; h < 2; ++h)
            from[h] = (uint32_t)min(own[h], last) * (uint32_t)(p.row / 8) + part * (PART / 8) + t;
        const auto fetch = [&](Batch<HAS_Y>& in, int step) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
#pragma unroll
                for (int n = 0; n < STREAMS; ++n)
                    in.v[h][n] = read(p.streams + ((int64_t)from[h] + step * (STEP / 8)) * 8 + n * p.stream);
                if constexpr (HAS_Y)
                    in.v[h][STREAMS] = read(p.y + (int64_t)min(own[h], last) * p.d + part * PART + t * 8 +
                                            step * STEP);
            }
        };
        Batch<HAS_Y> even, odd;
        fetch(even, 0);
        if constexpr (HAS_Y) {
            const int row = min(tile * ROWS + lane / 2, last),
                      first = lane % 2 * 3;   // a lane brings three or two of a row's five
            float4 v[3];
#pragma unroll
            for (int i = 0; i < 3; ++i) {
                const int number = min(first + i, FACTORS - 1);
                v[i] = number ? __ldcg(reinterpret_cast<const float4*>(p.comb) + (int64_t)row * STREAMS +
                                       number - 1)
                              : __ldcg(reinterpret_cast<const float4*>(p.gate) + row);
            }
            __syncwarp();   // all have read those of the tile before
#pragma unroll
            for (int i = 0; i < 3; ++i)
                if (first + i < FACTORS) factors[lane / 2 * FACTORS + first + i] = v[i];
            __syncwarp();
        }
        // Streams by twos: a chain of products is as short as a part of one stream was.
        float sums[2][TILES][4], square[2] = {0.f, 0.f};
#pragma unroll
        for (int i = 0; i < 2 * TILES * 4; ++i) sums[i / (TILES * 4)][i / 4 % TILES][i % 4] = 0.f;
        const auto work = [&](const Batch<HAS_Y>& in, int step) {
            uint32_t words[2][STREAMS][4];
            mix_streams<HAS_Y>(in, factors, words, square, g);
#pragma unroll
            for (int n = 0; n < STREAMS; ++n) {
                uint32_t a[2][4];   // [sixteen channels]: of rows g, g+8, g, g+8
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    const uint32_t (&w)[4] = words[h][n];
                    if (HAS_Y && own[h] <= last)
                        *reinterpret_cast<uint4*>(p.out + ((int64_t)own[h] * STREAMS + n) * p.d +
                                                  part * PART + step * STEP +
                                                  t * 8) = make_uint4(w[0], w[1], w[2], w[3]);
                    const uint32_t x = __shfl_xor_sync(~0u, is_upper ? w[0] : w[2], 2),
                                   y = __shfl_xor_sync(~0u, is_upper ? w[1] : w[3], 2);
                    a[0][h] = is_upper ? x : w[0];
                    a[0][h + 2] = is_upper ? y : w[1];
                    a[1][h] = is_upper ? w[2] : x;
                    a[1][h + 2] = is_upper ? w[3] : y;
                }
#pragma unroll
                for (int k = 0; k < 2; ++k) {
                    const char* fn = shared + ((n * (PART / 16)) + step * 2 + k) * FRAGMENT;
                    uint2 b[TILES * TERMS];
#pragma unroll
                    for (int i = 0; i < TILES * TERMS / 2; ++i) {
                        const uint4 v = reinterpret_cast<const uint4*>(fn + i * 512)[lane];
                        b[2 * i] = make_uint2(v.x, v.y);
                        b[2 * i + 1] = make_uint2(v.z, v.w);
                    }
                    b[8] = reinterpret_cast<const uint2*>(fn + 2048)[lane];
#pragma unroll
                    for (int term = 0; term < TERMS; ++term)
#pragma unroll
                        for (int i = 0; i < TILES; ++i) mma_bf16(sums[n / 2][i], a[k], b[i * TERMS + term]);
                }
            }
        };
        // What comes next is on its way meanwhile.
#pragma unroll 1
        for (int step = 0; step < PART / STEP; step += 2) {
            fetch(odd, step + 1);
            work(even, step);
            if (step + 2 < PART / STEP) fetch(even, step + 2);
            work(odd, step + 1);
        }
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            square[h] += __shfl_xor_sync(~0u, square[h], 1);
            square[h] += __shfl_xor_sync(~0u, square[h], 2);
            if (own[h] > last) continue;
            float* to = p.partial + ((int64_t)own[h] * parts + part) * WIDTH;
#pragma unroll
            for (int i = 0; i < TILES; ++i)
                *reinterpret_cast<float2*>(to + i * 8 + 2 * t) = make_float2(
                    sums[0][i][2 * h] + sums[1][i][2 * h], sums[0][i][2 * h + 1] + sums[1][i][2 * h + 1]);
            if (t == 0) to[SQUARES] = square[h];
        }
    }
}

struct Closing {
    const float* partial;           // [rows][parts][WIDTH]
    const float *scale, *base;      // [24]
    const __nv_bfloat16* streams;   // [rows][4][d], strides of rows and streams
    const float* weight;            // [d] of the norm
    __nv_bfloat16 *x, *normed;      // [rows][d]; null: not wanted, as all below
    char *in_16, *in_8;             // normed: packed in BF16, in FP8
    char* codes;                    // [rows][d] FP8
    float* scales;                  // [rows][d / 128], times 2^-24
    float *gate, *comb;
    int64_t row, stream;
    int rows, rows_padded, d, parts, iters;
    float norm_eps, hc_eps;
};

__device__ __forceinline__ float warp_sum(float v) {
#pragma unroll
    for (int i = 1; i < 32; i <<= 1) v += __shfl_xor_sync(~0u, v, i);
    return v;
}
__device__ __forceinline__ float inverse_size(float squares, int count, float eps) {
    return __frcp_rn(__fsqrt_rn(__fdiv_rn(squares, (float)count) + eps));
}
// Over the four lanes that differ in bits FIRST and 2 * FIRST.
template <int FIRST> __device__ __forceinline__ float sum_of_four(float v) {
    v += __shfl_xor_sync(~0u, v, FIRST);
    return v + __shfl_xor_sync(~0u, v, 2 * FIRST);
}

// A warp is a row; a lane has eight channels of every 256. Shared memory: eight rows in FP8, if these are
// wanted.
template <int ITEMS>
__global__ void __launch_bounds__(WARPS * 32, ITEMS <= 16 ? 2 : 1)
    close_kernel(const __grid_constant__ Closing p) {
    extern __shared__ __align__(16) char shared[];
    const int lane = threadIdx.x & 31, row = blockIdx.x * WARPS + (threadIdx.x >> 5),
              given = min(row, p.rows - 1);
    const bool is_row = row < p.rows;
    // Lanes 0 to 15 have the matrix, four a row; then four what weights the streams, four the gate, one the
    // squares.
    const int column = lane < 16 ? lane + 2 * STREAMS : lane - 16 + (lane == SQUARES) * 16;
    const float its_scale = lane < MIXES ? __ldg(p.scale + column) : 0.f,
                its_base = lane < MIXES ? __ldg(p.base + column) : 0.f;
    wait_for_prerequisites();
    float total = 0.f;
    const float* partial = p.partial + (int64_t)given * p.parts * WIDTH + column;
#pragma unroll 8
    for (int i = 0; i < p.parts; ++i) total += lane <= SQUARES ? __ldcg(partial + i * WIDTH) : 0.f;
    const float logit = total * inverse_size(__shfl_sync(~0u, total, SQUARES), STREAMS * p.d, p.norm_eps) *
                            its_scale +
                        its_base;
    const float share = __fdiv_rn(1.f, 1.f + expf(-logit));
    float into[STREAMS];
#pragma unroll
    for (int n = 0; n < STREAMS; ++n) into[n] = __shfl_sync(~0u, share, 16 + n) + p.hc_eps;

    const __nv_bfloat16* streams = p.streams + given * p.row + lane * 8;
    uint4 x[ITEMS];
    float square = 0.f;
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        x[i] = make_uint4(0, 0, 0, 0);
        if (i * PART >= p.d || !is_row) continue;
        uint4 in[STREAMS];
#pragma unroll
        for (int n = 0; n < STREAMS; ++n)
            in[n] = __ldcg(reinterpret_cast<const uint4*>(streams + n * p.stream + i * PART));
        uint32_t words[4];
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            float2 v = make_float2(0.f, 0.f);
#pragma unroll
            for (int n = 0; n < STREAMS; ++n) {
                const float2 s = open_bf16(word_of(in[n], k));
                v = make_float2(fmaf(into[n], s.x, v.x), fmaf(into[n], s.y, v.y));
            }
            words[k] = pack_bf16(v.x, v.y);
            v = open_bf16(words[k]);
            square = fmaf(v.x, v.x, fmaf(v.y, v.y, square));
        }
        x[i] = make_uint4(words[0], words[1], words[2], words[3]);
        if (p.x) *reinterpret_cast<uint4*>(p.x + (int64_t)row * p.d + i * PART + lane * 8) = x[i];
    }
    const float size = inverse_size(warp_sum(square), p.d, p.norm_eps);
    // Of rows packed in FP8 each line has 16 bytes of eight neighbours: they meet in shared memory, in units
    // of 128 bytes where row r is at r ^ unit, so that lanes meet in no bank.
    const int r = row & 7, sixteen = lane % 16 / 2, half = lane & 1;   // of 128 columns
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        if (i * PART >= p.d) break;
        const float4* weight = reinterpret_cast<const float4*>(p.weight + i * PART + lane * 8);
        const float4 low = __ldg(weight), high = __ldg(weight + 1);
        const float by[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
        uint32_t words[4];
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            const float2 v = open_bf16(word_of(x[i], k));
            words[k] = pack_bf16(by[2 * k] * (v.x * size), by[2 * k + 1] * (v.y * size));
        }
        const uint4 made = make_uint4(words[0], words[1], words[2], words[3]);
        if (p.normed && is_row)
            *reinterpret_cast<uint4*>(p.normed + (int64_t)row * p.d + i * PART + lane * 8) = made;
        if (p.in_16) {
            char* to = p.in_16 + at_16(row, p.d / SLICE, i * PART / SLICE);
            *reinterpret_cast<uint4*>(to + chunk_16(row, i % (SLICE / PART) * 32 + lane)) = chunk_of_two(
                made, lane & 1);
        }
        if (!p.in_8) continue;
        uint32_t peaks = peaks_of(made);
#pragma unroll
        for (int k = 1; k < 16; k <<= 1) peaks = larger(peaks, __shfl_xor_sync(~0u, peaks, k));
        const Codes8 codes(peaks);
        const uint2 eight = codes.of(made);
        const int unit = i * 16 + lane / 16 * 8 + sixteen;
        *reinterpret_cast<uint2*>(shared + unit * 128 + ((r ^ unit & 7) * 16) + half * 8) = eight;
        if (lane % 16 == 0 && row < p.rows_padded)
            reinterpret_cast<float*>(p.in_8 + at_8(row, p.d / PART, i) +
                                     2048)[lane / 16 * 8 + r] = codes.scale;
        if (p.codes && is_row) {
            *reinterpret_cast<uint2*>(p.codes + (int64_t)row * p.d + i * PART + lane * 8) = eight;
            if (lane % 16 == 0) p.scales[(int64_t)row * (p.d / 128) + i * 2 + lane / 16] = codes.scale;
        }
    }
    if (p.in_16 && lane < p.d / SLICE)
        *reinterpret_cast<float*>(p.in_16 + at_16(row, p.d / SLICE, lane) + undo_16(row)) = 1.f;
    if (p.in_8) {
        __syncthreads();
        const int first = blockIdx.x * WARPS;   // rows_padded is a multiple of sixteen: all eight are there
        const auto place = [&](int at) { return (at / 8 * 8 + ((at ^ at / 8) & 7)) * 16; };
        for (int at = threadIdx.x; at < WARPS * p.d / 16; at += WARPS * 32)   // 128 of 256 columns
            *reinterpret_cast<uint4*>(p.in_8 + at_8(first, p.d / PART, at / 128) +
                                      place(at % 128)) = reinterpret_cast<const uint4*>(shared)[at];
    }

    // Sinkhorn's rounds, where nobody waits for them.
    if (is_row && lane >= 20 && lane < MIXES) p.gate[(int64_t)row * STREAMS + lane - 20] = 2.f * share;
    float top = fmaxf(logit, __shfl_xor_sync(~0u, logit, 1));
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
    float m = lane < 16 ? expf(logit - top) : 1.f;
    m = __fdividef(m, sum_of_four<1>(m)) + p.hc_eps;
    m = __fdividef(m, sum_of_four<4>(m) + p.hc_eps);
    for (int i = 1; i < p.iters; ++i) {
        m = __fdividef(m, sum_of_four<1>(m) + p.hc_eps);
        m = __fdividef(m, sum_of_four<4>(m) + p.hc_eps);
    }
    if (is_row && lane < 16) p.comb[(int64_t)row * 16 + lane] = m;
}

// What prefill_sm90.py launches.
template __global__ void open_kernel<false>(const __grid_constant__ Opening);
template __global__ void open_kernel<true>(const __grid_constant__ Opening);
template __global__ void close_kernel<16>(const __grid_constant__ Closing);
template __global__ void close_kernel<32>(const __grid_constant__ Closing);
