// Decode step: what follows from the streams' sums with `fn`. The next input of a layer's half, which is the
// four streams weighted and then normalised, by one block per row; by another what weights its output and,
// but for Sinkhorn's rounds, mixes the streams.
#include "mix.cuh"
#include "round.cuh"

constexpr int THREADS = 512, WARPS = THREADS / 32, SQUARES = STREAMS;
constexpr int WIDTH =
    32;   // columns of `partial`: four mixes that weight the streams, the sum of squares, the other twenty
constexpr int ITEM = 8, MAX_ITEMS = 2, COLUMNS = 8, MAX_PASSES = 2,
              MAX_CHUNKS = MAX_PASSES * THREADS / 4;   // decode.py counts on them

// The few numbers that everything waits for, by the hardware's own functions: a share is right to 2^-21 of
// one. One over the root of the mean square of `count` numbers.
__device__ __forceinline__ float inverse_size(float squares, int count, float eps) {
    return rsqrtf(__fdividef(squares, (float)count) + eps);
}
__device__ __forceinline__ float sigmoid(float v) { return __fdividef(1.f, 1.f + __expf(-v)); }

struct Eight {
    float v[ITEM];
};
__device__ __forceinline__ Eight read(const __nv_bfloat16* p) {
    const uint4 w = __ldcg(reinterpret_cast<const uint4*>(p));
    const uint32_t words[4] = {w.x, w.y, w.z, w.w};
    Eight e;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        e.v[2 * i] = __uint_as_float(words[i] << 16);
        e.v[2 * i + 1] = __uint_as_float(words[i] & 0xFFFF0000u);
    }
    return e;
}
__device__ __forceinline__ Eight read(const float* p) {
    const float4 a = __ldcg(reinterpret_cast<const float4*>(p)),
                 b = __ldcg(reinterpret_cast<const float4*>(p) + 1);
    return {{a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w}};
}
// The same as they are stored.
template <typename Act> struct Stored;
template <> struct Stored<__nv_bfloat16> {
    uint32_t v[ITEM / 2];
    __device__ __forceinline__ explicit Stored(const Eight& e) {
#pragma unroll
        for (int i = 0; i < ITEM / 2; ++i) v[i] = pack_bf16(e.v[2 * i], e.v[2 * i + 1]);
    }
    __device__ __forceinline__ void write(__nv_bfloat16* p) const {
        *reinterpret_cast<uint4*>(p) = make_uint4(v[0], v[1], v[2], v[3]);
    }
};
template <> struct Stored<float> {
    float v[ITEM];
    __device__ __forceinline__ explicit Stored(const Eight& e) {
#pragma unroll
        for (int i = 0; i < ITEM; ++i) v[i] = e.v[i];
    }
    __device__ __forceinline__ void write(float* p) const {
        reinterpret_cast<float4*>(p)[0] = make_float4(v[0], v[1], v[2], v[3]);
        reinterpret_cast<float4*>(p)[1] = make_float4(v[4], v[5], v[6], v[7]);
    }
};
__device__ __forceinline__ float rounded(float v, __nv_bfloat16) {
    return __bfloat162float(__float2bfloat16_rn(v));
}
__device__ __forceinline__ float rounded(float v, float) { return v; }

// The mean of a thread's channels over the streams.
template <typename Act>
__device__ __forceinline__ void write_mean(Act* mean, const Eight (&s)[MAX_ITEMS][STREAMS], int d) {
#pragma unroll
    for (int i = 0; i < MAX_ITEMS; ++i) {
        const int channel = (threadIdx.x + i * THREADS) * ITEM;
        if (channel >= d) break;
        Eight m = s[i][0];
#pragma unroll
        for (int k = 0; k < ITEM; ++k) {
#pragma unroll
            for (int n = 1; n < STREAMS; ++n) m.v[k] += s[i][n].v[k];
            m.v[k] *= 1.f / STREAMS;
        }
        Stored<Act>(m).write(mean + channel);
    }
}

// gate and comb of one row: a warp adds up every WARPS-th chunk, a lane is a column.
__device__ __forceinline__ void next_output(const float* partial, const float* base, const float* scale,
                                            float* gate, float* comb, int d, int chunks, float norm_eps,
                                            float hc_eps) {
    __shared__ float parts[WARPS][WIDTH];
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const bool is_mix = lane > SQUARES && lane <= SQUARES + STREAMS + STREAMS * STREAMS;
    const float its_scale = is_mix ? __ldg(scale + lane - 1) : 0.f,
                its_base = is_mix ? __ldg(base + lane - 1) : 0.f;
    launch_dependents();
    wait_for_prerequisites();
    float v[MAX_CHUNKS / WARPS], total = 0.f;
#pragma unroll
    for (int i = 0; i < MAX_CHUNKS / WARPS; ++i) {
        const int chunk = warp + i * WARPS;
        v[i] = chunk < chunks && (is_mix || lane == SQUARES) ? __ldcg(partial + (size_t)chunk * WIDTH + lane)
                                                             : 0.f;
    }
#pragma unroll
    for (int i = 0; i < MAX_CHUNKS / WARPS; ++i) total += v[i];
    parts[warp][lane] = total;
    __syncthreads();
    if (warp) return;
    total = 0.f;
#pragma unroll
    for (int i = 0; i < WARPS; ++i) total += parts[i][lane];
    const float logit =
        total * inverse_size(__shfl_sync(~0u, total, SQUARES), STREAMS * d, norm_eps) * its_scale + its_base;
    if (is_mix && lane <= SQUARES + STREAMS) gate[lane - SQUARES - 1] = 2.f * sigmoid(logit);
    // Lanes 0 to 15 are the matrix, four a row; each row's softmax.
    float m = __shfl_sync(~0u, logit, (lane + SQUARES + STREAMS + 1) & 31);
    const float top = fmaxf(fmaxf(m, __shfl_xor_sync(~0u, m, 1)),
                            fmaxf(__shfl_xor_sync(~0u, m, 2), __shfl_xor_sync(~0u, m, 3)));
    m = __expf(m - top);
    const float pair = m + __shfl_xor_sync(~0u, m, 1);
    const float sum = pair + __shfl_xor_sync(~0u, pair, 2);
    if (lane < STREAMS * STREAMS) comb[lane] = __fdividef(m, sum) + hc_eps;
}

template <typename Act> struct Closing {
    const float* partial;   // [rows][chunks][WIDTH]
    const float *base, *scale;
    const Act* streams;    // [rows][STREAMS][d]
    const float* weight;   // [d]
    Act *x, *x_in;         // [rows][d]; x_in null with A16
    Act *mixed, *mean;     // [rows][d], rows of mean `mean_stride` apart; or null
    float *gate, *comb;    // [rows][STREAMS], [rows][STREAMS][STREAMS]
    int rows, d, chunks, how, mean_stride;
    float norm_eps, hc_eps;
};

template <typename Act> __global__ void __launch_bounds__(THREADS) close_kernel(const Closing<Act> p) {
    __shared__ float parts[WARPS][COLUMNS], squares[WARPS];
    __shared__ uint32_t tops[WARPS];
    const int row = blockIdx.x % p.rows;
    const float* partial = p.partial + (size_t)row * p.chunks * WIDTH;
    if (blockIdx.x >= p.rows) {
        next_output(partial, p.base, p.scale, p.gate + row * STREAMS, p.comb + row * STREAMS * STREAMS, p.d,
                    p.chunks, p.norm_eps, p.hc_eps);
        return;
    }
    const int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31, column = lane % COLUMNS;
    const float its_scale = column < STREAMS ? __ldg(p.scale + column) : 0.f,
                its_base = column < STREAMS ? __ldg(p.base + column) : 0.f;
    Eight w[MAX_ITEMS], s[MAX_ITEMS][STREAMS];
#pragma unroll
    for (int i = 0; i < MAX_ITEMS; ++i)
        if ((tid + i * THREADS) * ITEM < p.d) w[i] = read(p.weight + (tid + i * THREADS) * ITEM);
    launch_dependents();
    wait_for_prerequisites();
    const Act* streams = p.streams + (size_t)row * STREAMS * p.d;
    // Four threads read the first eight columns of a chunk: the mixes that weight the streams, and the sum of
    // squares.
    float2 two[MAX_PASSES];
#pragma unroll
    for (int i = 0; i < MAX_PASSES; ++i) {
        const int chunk = tid / 4 + i * (THREADS / 4);
        const float2* from = reinterpret_cast<const float2*>(partial + (size_t)chunk * WIDTH) + tid % 4;
        two[i] = chunk < p.chunks && tid % 4 <= SQUARES / 2 ? __ldcg(from) : make_float2(0.f, 0.f);
    }
#pragma unroll
    for (int i = 0; i < MAX_ITEMS; ++i)
#pragma unroll
        for (int n = 0; n < STREAMS; ++n)
            if ((tid + i * THREADS) * ITEM < p.d)
                s[i][n] = read(streams + (size_t)n * p.d + (tid + i * THREADS) * ITEM);
    if (p.mean) write_mean(p.mean + (size_t)row * p.mean_stride, s, p.d);
    float even_column = two[0].x + two[1].x, odd_column = two[0].y + two[1].y;
#pragma unroll
    for (int i = 4; i < 32; i <<= 1) {
        even_column += __shfl_xor_sync(~0u, even_column, i);
        odd_column += __shfl_xor_sync(~0u, odd_column, i);
    }
    if (lane < 4) {
        parts[warp][2 * lane] = even_column;
        parts[warp][2 * lane + 1] = odd_column;
    }
    __syncthreads();
    float total = 0.f;
#pragma unroll
    for (int i = 0; i < WARPS / 4; ++i) total += parts[lane / COLUMNS * 4 + i][column];
    total += __shfl_xor_sync(~0u, total, 8);
    total += __shfl_xor_sync(~0u, total, 16);
    const float inv = inverse_size(__shfl_sync(~0u, total, SQUARES), STREAMS * p.d, p.norm_eps);
    const float share = sigmoid(total * inv * its_scale + its_base) + p.hc_eps;
    float into[STREAMS];
#pragma unroll
    for (int n = 0; n < STREAMS; ++n) into[n] = __shfl_sync(~0u, share, n);
    Eight y[MAX_ITEMS];
    float square = 0.f;
#pragma unroll
    for (int i = 0; i < MAX_ITEMS; ++i)
        if ((tid + i * THREADS) * ITEM < p.d)
#pragma unroll
            for (int k = 0; k < ITEM; ++k) {
                float v = into[0] * s[i][0].v[k];
#pragma unroll
                for (int n = 1; n < STREAMS; ++n) v = fmaf(into[n], s[i][n].v[k], v);
                y[i].v[k] = rounded(v, Act());
                square = fmaf(y[i].v[k], y[i].v[k], square);
            }
#pragma unroll
    for (int i = 1; i < 32; i <<= 1) square += __shfl_xor_sync(~0u, square, i);
    if (lane == 0) squares[warp] = square;
    __syncthreads();
    square = squares[lane % WARPS];
#pragma unroll
    for (int i = 1; i < WARPS; i <<= 1) square += __shfl_xor_sync(~0u, square, i);
    const float size = inverse_size(square, p.d, p.norm_eps);
    if (p.mixed)
#pragma unroll
        for (int i = 0; i < MAX_ITEMS; ++i)
            if ((tid + i * THREADS) * ITEM < p.d)
                Stored<Act>(y[i]).write(p.mixed + (size_t)row * p.d + (tid + i * THREADS) * ITEM);
    // As quantised products want it, too. What lies beyond the row stays zero.
    uint32_t top = 0;
#pragma unroll
    for (int i = 0; i < MAX_ITEMS; ++i) {
        const bool is_inside = (tid + i * THREADS) * ITEM < p.d;
#pragma unroll
        for (int k = 0; k < ITEM; ++k) y[i].v[k] = is_inside ? w[i].v[k] * (y[i].v[k] * size) : 0.f;
        const Stored<Act> x(y[i]);
        if (is_inside) x.write(p.x + (size_t)row * p.d + (tid + i * THREADS) * ITEM);
        if (p.how == A4) top = max(top, largest(x.v));
    }
    if (p.how == A16) return;
    if (p.how == A4) {
        top = __reduce_max_sync(~0u, top);
        if (lane == 0) tops[warp] = top;
        __syncthreads();
        top = __reduce_max_sync(~0u, tops[lane % WARPS]);
    }
    const float scale = row_scale(top);
#pragma unroll
    for (int i = 0; i < MAX_ITEMS; ++i) {
        if (i * THREADS * ITEM >= p.d) break;   // a whole row's width, so for all threads
        Stored<Act> x(y[i]);
        if (p.how == A4) round_a4(x.v, largest(x.v), scale);
        else round_a8(x.v);
        if ((tid + i * THREADS) * ITEM < p.d)
            x.write(p.x_in + (size_t)row * p.d + (tid + i * THREADS) * ITEM);
    }
}

// What decode.py launches.
static_assert(THREADS == 512);
template __global__ void close_kernel<float>(const Closing<float>);
template __global__ void close_kernel<__nv_bfloat16>(const Closing<__nv_bfloat16>);
