// Decode step: the next token of each row, as ops/sample/cpu.py chooses it, bit for bit. One cluster of
// blocks per row, one launch. Ends prompts too.
//
// Nothing is sorted: each block of a cluster has a slice of the row's logits, and histograms find what is
// wanted from the top (sample_row.cuh). All sums are integers: no order matters.
#include "sample_row.cuh"

enum { CHOSEN, NOT_FINITE, NONE_ALLOWED };   // status
constexpr int WIDTH = 8, MAX_TOP = 20, RESULT = 4 + 2 * MAX_TOP;
constexpr int BATCH = 32;   // logits that a thread asks for at once
// Logits of a block in shared memory, so that all of it stays below 99 KiB; further ones are read again from
// the L2 cache.
constexpr int MOST_HELD = 18500, BLOCK_BYTES = 25616;

struct Sampling {
    const float* logits;   // [rows][vocab]
    int vocab;
    int64_t* settings;      // [rows][WIDTH]
    const uint32_t* mask;   // [rows][(vocab + 31) / 32], or null
    int* out;               // [rows][RESULT]
    int64_t* next_ids;      // [rows], or null
    int64_t* positions;     // [rows], -1: padding; or null
    const int64_t* slots;   // [rows], or null
    int64_t* latest;        // [slots], or null
    int* penalties;         // [slots][penalty_width], or null
    int penalty_width;
    int slice, held;   // logits of a block, and how many of them are in shared memory
};

// The best token of all and the best allowed one, and the lowest logit: a thread's.
struct Best {
    float top = -INFINITY, top_allowed = -INFINITY, low_end = INFINITY;
    int top_id = 0, top_allowed_id = 0;
    bool is_broken = false;   // something is not finite
};

// Finds them in batches of logits, of which the first is in `v`, and keeps the logits where they are needed
// again. Ids rise, so of ties the lower one stays.
template <int CLUSTER, int THREADS, typename Load>
__device__ __forceinline__ Best find_best(const Row<CLUSTER, THREADS>& r, const float (&v)[BATCH],
                                          bool is_simple, bool is_masked, const Load& load) {
    Best best;
    for (int first = r.tid; first < r.mine;) {
#pragma unroll
        for (int i = 0; i < BATCH; ++i) {
            best.is_broken |= !(v[i] < INFINITY);
            if (v[i] > best.top) {
                best.top = v[i];
                best.top_id = r.start + first + i * THREADS;
            }
        }
        if (!is_simple) {
#pragma unroll
            for (int i = 0; i < BATCH; ++i) {
                if (v[i] > -INFINITY) best.low_end = fminf(best.low_end, v[i]);
                if (first + i * THREADS < min(r.mine, r.held)) r.values[first + i * THREADS] = v[i] + 0.f;
            }
        }
        if (is_masked) {
            uint32_t bits = 0;
#pragma unroll
            for (int i = 0; i < BATCH; ++i)
                if (first + i * THREADS < r.mine)
                    bits |= (uint32_t)r.is_allowed(r.start + first + i * THREADS) << i;
#pragma unroll
            for (int i = 0; i < BATCH; ++i)
                if (v[i] > best.top_allowed && bits >> i & 1) {
                    best.top_allowed = v[i];
                    best.top_allowed_id = r.start + first + i * THREADS;
                }
        }
        first += BATCH * THREADS;
        if (first < r.mine) load(first);
    }
    if (!is_masked) {
        best.top_allowed = best.top;
        best.top_allowed_id = best.top_id;
    }
    return best;
}

// 0: none.
__device__ __forceinline__ uint64_t key_of(float v, int id) {
    return v > -INFINITY ? (uint64_t)order_of(v) << 32 | (uint32_t)~id : 0;
}

// The same of penalised logits: the key of the best allowed one, the complement of the lowest.
template <int CLUSTER, int THREADS>
__device__ __forceinline__ void find_penalised(Row<CLUSTER, THREADS>& r, bool is_masked,
                                               uint64_t (&both)[2]) {
    float top_allowed = -INFINITY, low_end = INFINITY;
    int top_allowed_id = 0;
#pragma unroll 1
    for (int i = r.tid; i < r.mine; i += THREADS) {
        const float v = r.values[i];
        if (v > -INFINITY) low_end = fminf(low_end, v);
        if (v > top_allowed && (!is_masked || r.is_allowed(r.start + i))) {
            top_allowed = v;
            top_allowed_id = r.start + i;
        }
    }
    both[0] = key_of(top_allowed, top_allowed_id);
    both[1] = (uint32_t)~order_of(low_end);
    r.template all<false>(both);
}

// Writes the `num_top` best tokens with their log-probabilities. Returns how many there are.
template <int CLUSTER, int THREADS>
__device__ __forceinline__ int put_logprobs(Row<CLUSTER, THREADS>& r, int num_top, float best_of_all,
                                            float lowest, double log_total, int* out) {
    const Ruler by = ruler(best_of_all, best_of_all - lowest);
    const auto weight = [](float) { return uint64_t(1); };
    const auto range = r.template narrow<false, true>(by, 0, weight,
                                                      [&](uint64_t) { return (uint64_t)num_top; });
    const int count = r.list(by, range.low, ~uint64_t(0), weight);
    const int listed = min(count, num_top);
    if (r.block == 0)
#pragma unroll 1
        for (int i = r.tid; i < count; i += THREADS) {
            int rank = 0;
            for (int j = 0; j < count; ++j) rank += r.s.places[j] > r.s.places[i];
            if (rank >= num_top) continue;
            out[4 + rank] = id_at(r.s.places[i]);
            out[4 + MAX_TOP + rank] = bits_as<int>(
                logprob_of(value_at(r.s.places[i]), best_of_all, log_total));
        }
    return listed;
}

// Draws a token: of those that top-k, top-p and min-p keep the one with the largest key.
template <int CLUSTER, int THREADS>
__device__ __forceinline__ int draw(Row<CLUSTER, THREADS>& r, const int64_t* settings, double temperature,
                                    bool is_masked, float best, float lowest) {
    const double top_p = bits_as<double>(__ldcg(settings + 1)), min_p = bits_as<double>(__ldcg(settings + 2));
    const int64_t top_k = __ldcg(settings + 5);
    if (is_masked) r.apply_mask();
    const double inverse = inverse_of(temperature);
    const auto weight = [&](float v) {
        const bool is_far = x_estimate(v, best, inverse) < -31.5;
        return is_far ? uint64_t(0) : (uint64_t)weight_of(div(distance(v, best), temperature));
    };
    uint64_t low = 0;   // the lowest place that is kept
    const float span = best - lowest, weighty = (float)fmin(31.0 * temperature, 3e38);
    const Ruler by = ruler(best, top_p < 1 ? fminf(span, weighty) : span);
    if (top_k > 0)
        low = r.template last_taken<false>(
            by, low, [](float) { return uint64_t(1); }, [&](uint64_t) { return (uint64_t)top_k; });
    if (top_p < 1)
        low = r.template last_taken<true>(by, low, weight,
                                          [&](uint64_t total) { return needed_of(total, top_p); });
    const int64_t least = least_weight(min_p);
    const double least_x = least > 0 ? fmax(MIN_X, log_of(mul((double)least, 0x1p-44)) - 0.01) : MIN_X;

    const uint64_t base = noise_base(__ldcg(settings + 3), __ldcg(settings + 4));
    // The estimated key of a token that is kept and may win, else -inf.
    const auto estimate = [&](float v, int id) {
        const double x = x_estimate(v, best, inverse);
        if (!(x >= least_x) || (low && place_of(by, v, id) < low)) return -INFINITY;
        if (least > 0 && (int64_t)weight(v) < least) return -INFINITY;
        return key_estimate(x, random_bits(base, id));
    };
    float own = -INFINITY;
    r.each([&](float v, int id) { own = fmaxf(own, estimate(v, id)); });
    const float cut = value_of((uint32_t)r.all_max(order_of(own))) - 2 * KEY_ERROR;
    uint64_t key = 0;
    uint32_t winner = 0;   // complement of the id
    if (own >= cut)
        r.each([&](float v, int id) {
            if (estimate(v, id) < cut) return;
            const uint64_t exact = order_of(exact_key(v, best, temperature, random_bits(base, id)));
            if (exact <= key) return;   // ids rise: of ties the lower one stays
            key = exact;
            winner = ~(uint32_t)id;
        });
    const uint64_t highest = r.all_max(key);
    return (int)~(uint32_t)r.all_max(key == highest ? winner : 0);
}

template <int CLUSTER, int THREADS>
__global__ void __launch_bounds__(THREADS) sample_kernel(const Sampling p) {
    auto& s = *(Memory<CLUSTER, THREADS>*)shared_memory();
    const int row = blockIdx.x / CLUSTER, block = blockIdx.x % CLUSTER, tid = threadIdx.x;
    const int start = min(block * p.slice, p.vocab), mine = min(p.slice, p.vocab - start);
    const float* logits = p.logits + (size_t)row * p.vocab + start;
    int64_t* settings = p.settings + row * WIDTH;
    int* out = p.out + (size_t)row * RESULT;
    all_started();   // waited for before the first write to another block: by then that block runs
    launch_dependents();
    wait_for_prerequisites();

    float v[BATCH];   // all at once, and before anything depends on the settings
    const auto load = [&](int first) {
#pragma unroll
        for (int i = 0; i < BATCH; ++i)
            v[i] = first + i * THREADS < mine ? __ldcg(logits + first + i * THREADS) : -INFINITY;
    };
    load(tid);
    const int64_t position = p.positions ? __ldcg(p.positions + row) : 0;
    const double temperature = bits_as<double>(__ldcg(settings));
    const int64_t asked = __ldcg(settings + 6), forced = __ldcg(settings + 7);
    const int num_top = min((int)(uint32_t)asked, MAX_TOP);
    const int penalised_as = forced < 0 ? (int)(asked >> 33) - 1 : -1;   // row of the penalties
    const bool is_masked = asked >> 32 & 1 && forced < 0;
    const bool is_simple = temperature == 0 && num_top < 0 && forced < 0 && penalised_as < 0;
    if (position < 0) {   // padding
        __syncwarp();
        all_wait();
        return;
    }
    Row<CLUSTER, THREADS> r = {s,      (float*)(&s + 1),
                               logits, p.mask ? p.mask + (size_t)row * ((p.vocab + 31) / 32) : nullptr,
                               start,  mine,
                               p.held};

    const Best found = find_best(r, v, is_simple, is_masked, load);
    // The largest of all numbers stands for something that is not finite.
    uint64_t ends[3] = {key_of(found.top_allowed, found.top_allowed_id),
                        found.is_broken ? ~uint64_t(0) : key_of(found.top, found.top_id),
                        (uint32_t)~order_of(found.low_end)};
    __syncwarp();
    all_wait();
    r.template all<false>(ends);
    const bool is_finite = ends[1] != ~uint64_t(0);
    int status = !is_finite ? NOT_FINITE : ends[0] == 0 || forced >= p.vocab ? NONE_ALLOWED : CHOSEN;
    int id = status != CHOSEN ? -1 : forced >= 0 ? (int)forced : (int)~(uint32_t)ends[0];
    const float best_of_all = value_of((uint32_t)(ends[1] >> 32));
    float best = value_of((uint32_t)(ends[0] >> 32)), lowest = value_of(~(uint32_t)ends[2]);

    double log_total = 0;
    int listed = 0;
    if (num_top >= 0 && status == CHOSEN) {
        uint64_t sum = 0;
        r.each([&](float v, int) { sum += weight_of(distance(v, best_of_all)); });
        log_total = log_of_total(r.all_sum(sum));
        if (num_top > 0) listed = put_logprobs(r, num_top, best_of_all, lowest, log_total, out);
    }

    int* latest_place = nullptr;   // of the row's input in its history
    if (penalised_as >= 0) {
        int* table = p.penalties + (size_t)penalised_as * p.penalty_width;
        const int end = __ldcg(table + 3) + (int)__ldcg(settings + 4);
        latest_place = table + HISTORY + end - 1;
        if (status == CHOSEN) {
            r.penalise(table, end, p.next_ids ? (int)__ldcg(p.next_ids + row) : -1);
            uint64_t both[2];
            find_penalised(r, is_masked, both);
            id = (int)~(uint32_t)both[0];
            best = value_of((uint32_t)(both[0] >> 32));
            lowest = value_of(~(uint32_t)both[1]);
        }
    }

    if (temperature > 0 && forced < 0 && status == CHOSEN)
        id = draw(r, settings, temperature, is_masked, best, lowest);
    if (!is_simple) all_sync();   // no block leaves while another reads its memory
    if (block != 0) return;

    if (tid >= listed && tid < MAX_TOP) out[4 + tid] = out[4 + MAX_TOP + tid] = -1;
    if (tid == 0) {
        const bool has_logprob = num_top >= 0 && status == CHOSEN;
        out[0] = id;
        out[1] = has_logprob ? bits_as<int>(logprob_of(read(p.logits + (size_t)row * p.vocab + id),
                                                       best_of_all, log_total))
                             : -1;
        out[2] = status;
        out[3] = 0;
        if (latest_place && p.next_ids) *latest_place = (int)p.next_ids[row];
        if (p.next_ids) p.next_ids[row] = id;
        if (p.latest) p.latest[p.slots[row]] = id;
        if (p.positions) {
            p.positions[row] = position + 1;
            settings[4] = __ldcg(settings + 4) + 1;
        }
    }
}

// What decode.py launches, with this much shared memory beside the logits.
#ifdef __CUDACC__
using Block = Memory<8, 512>;   // 1,024 threads would spill registers
static_assert(sizeof(Block) == BLOCK_BYTES && BLOCK_BYTES + MOST_HELD * 4 <= 99 * 1024,
              "as decode.py has it, and no more than a block of sm_120 can have");
template __global__ void sample_kernel<8, 512>(const Sampling);
#endif
