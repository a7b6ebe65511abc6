// Decode step: the next token of each row, as ops/sample/cpu.py chooses it, bit for bit. One cluster of blocks per row, one
// launch. Ends prompts too.
//
// A row's logits are cut in slices, one per block; a thread reads the same tokens in every pass, so a slice needs no barriers.
// Nothing is sorted: what is wanted from the top (a count, or a weight) is found by histograms over ever smaller ranges of places
// (sample.cuh) until few tokens are left, which every block then lists and compares. All sums are integers: no order matters.
#include "cluster.cuh"
#include "sample.cuh"

enum { CHOSEN, NOT_FINITE, NONE_ALLOWED };   // status
constexpr int WIDTH = 8, MAX_TOP = 20, RESULT = 4 + 2 * MAX_TOP;
// Of a row of penalties, as ops/sample/cpu.py has it.
constexpr int MAX_BIAS = 1024, BIAS_IDS = 8, BIASES = BIAS_IDS + MAX_BIAS, HISTORY = BIASES + MAX_BIAS;
constexpr int BUCKETS = 1 << COARSE, LISTED = 256, BATCH = 32;
// Logits of a block in shared memory, so that all of it stays below 99 KiB; further ones are read again from the L2 cache.
constexpr int MOST_HELD = 18500, BLOCK_BYTES = 25616;

struct Sampling {
    const float* logits;    // [rows][vocab]
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
    int slice, held;        // logits of a block, and how many of them are in shared memory
};

struct alignas(16) Bucket {
    uint32_t count, part[3];   // of the sum of weights: 15 bits each, so that the sums of 2^17 tokens fit
};

template <int CLUSTER, int THREADS> struct Memory {
    Bucket buckets[2][BUCKETS];
    uint64_t partial[2][3][CLUSTER * THREADS / 32];
    uint64_t sums[BUCKETS];       // of all blocks: what is wanted, weights or tokens
    uint64_t listed_places[LISTED], listed_weights[LISTED];   // of this block
    uint64_t places[LISTED], weights[LISTED];                 // of all blocks
    uint64_t found;
    uint32_t counts[BUCKETS];
    uint32_t num_listed;
};

// A zero without its sign, as the reference has it.
__device__ __forceinline__ float read(const float* p) { return __ldcg(p) + 0.f; }

__device__ __forceinline__ uint64_t warp_max(uint64_t v) {
    const uint32_t high = __reduce_max_sync(~0u, (uint32_t)(v >> 32));
    const uint32_t low = __reduce_max_sync(~0u, (uint32_t)(v >> 32) == high ? (uint32_t)v : 0u);
    return (uint64_t)high << 32 | low;
}
__device__ __forceinline__ uint64_t warp_sum(uint64_t v) {
    for (int i = 16; i; i >>= 1) v += __shfl_xor_sync(~0u, v, i);
    return v;
}

template <int CLUSTER, int THREADS> struct Row {
    static constexpr int WARPS = THREADS / 32;
    Memory<CLUSTER, THREADS>& s;
    float* values;               // [held]; a thread touches its own only
    const float* logits;         // of this block's slice
    const uint32_t* mask;        // of the row
    int start, mine, held;       // first token of the slice, how many, how many in shared memory
    bool is_masked = false;
    int turn = 0, level = 0;     // which of two places for partial results, for buckets
    const int block = blockIdx.x % CLUSTER, tid = threadIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32;

    __device__ __forceinline__ bool is_allowed(int id) const { return mask && (__ldcg(mask + id / 32) >> id % 32 & 1); }

    // f(logit, id) for this thread's finite logits, allowed ones if the row is masked.
    template <typename F> __device__ __forceinline__ void each(const F& f) const {
#pragma unroll 1
        for (int i = tid; i < mine; i += THREADS) {
            float v = i < held ? values[i] : read(logits + i);
            if (is_masked && i >= held && !is_allowed(start + i)) v = -INFINITY;
            if (v > -INFINITY) f(v, start + i);
        }
    }

    __device__ __forceinline__ void apply_mask() {
        is_masked = true;
#pragma unroll 8
        for (int i = tid; i < min(mine, held); i += THREADS)
            if (!is_allowed(start + i)) values[i] = -INFINITY;
    }

    // Penalises the slice, all of which must fit in shared memory. There lie, in the logits' place, first the counts of the `end`
    // tokens before this one; the last of them is `latest` where it is not yet in the table.
    __device__ void penalise(const int* table, int end, int latest) {
        constexpr int EACH = MAX_BIAS / THREADS;
        const Penalties how = {bits_as<float>(__ldcg(table)), bits_as<float>(__ldcg(table + 1)), bits_as<float>(__ldcg(table + 2))};
        const int num_prompt = __ldcg(table + 3), first = __ldcg(table + 4), num_bias = __ldcg(table + 5);
        uint32_t* seen = (uint32_t*)values;
#pragma unroll 1
        for (int i = tid; i < mine; i += THREADS) seen[i] = 0;
        __syncthreads();
#pragma unroll 1
        for (int64_t i = (int64_t)first + tid; i < end; i += THREADS) {
            const int at = (i == end - 1 && latest >= 0 ? latest : __ldcg(table + HISTORY + i)) - start;
            if (at < 0 || at >= mine) continue;
            if (i < num_prompt) atomicOr(seen + at, IN_PROMPT);
            else atomicAdd(seen + at, 1u);
        }
        __syncthreads();
        int biased[EACH];   // places in the slice
        uint32_t biased_seen[EACH];
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            const int entry = tid + i * THREADS, at = entry < num_bias ? __ldcg(table + BIAS_IDS + entry) - start : -1;
            biased[i] = at < mine ? at : -1;
            biased_seen[i] = biased[i] >= 0 ? seen[at] : 0;
        }
        __syncthreads();
#pragma unroll 4
        for (int i = tid; i < mine; i += THREADS) values[i] = penalised(read(logits + i), 0.f, seen[i], how);
        __syncthreads();
#pragma unroll
        for (int i = 0; i < EACH; ++i)
            if (biased[i] >= 0) {
                const float bias = bits_as<float>(__ldcg(table + BIASES + tid + i * THREADS));
                values[biased[i]] = penalised(read(logits + biased[i]), bias, biased_seen[i], how);
            }
        __syncthreads();
    }

    // The largest or the sum over all threads of the cluster; all learn it. Two places alternate: one is written again only
    // after a barrier that all reach when they have read it.
    template <bool SUM, int N> __device__ __forceinline__ void all(uint64_t (&v)[N]) {
        auto& partial = s.partial[turn & 1];
#pragma unroll
        for (int n = 0; n < N; ++n) {
            v[n] = SUM ? warp_sum(v[n]) : warp_max(v[n]);
            if (lane < CLUSTER) *in_block(&partial[n][block * WARPS + warp], lane) = v[n];
        }
        all_sync();
#pragma unroll
        for (int n = 0; n < N; ++n) {
            uint64_t whole = 0;
            for (int i = lane; i < CLUSTER * WARPS; i += 32) {
                const uint64_t of = partial[n][i];
                whole = SUM ? whole + of : of > whole ? of : whole;
            }
            v[n] = SUM ? warp_sum(whole) : warp_max(whole);
        }
        ++turn;
    }
    __device__ __forceinline__ uint64_t all_max(uint64_t v) {
        uint64_t one[1] = {v};
        all<false>(one);
        return one[0];
    }
    __device__ __forceinline__ uint64_t all_sum(uint64_t v) {
        uint64_t one[1] = {v};
        all<true>(one);
        return one[0];
    }

    // Tokens from `low` to `high`: the last one taken is among them, and `left` of what was wanted is to be had there.
    struct Range {
        uint64_t low, high, left;
        bool is_all;   // there is less than was wanted
    };

    // From the places not below `low`, the last of the best that have `wanted` tokens or, with BY_WEIGHT, wanted(total) weight.
    // A range of at most LISTED tokens that holds it; FROM_TOP: together with all better ones.
    template <bool BY_WEIGHT, bool FROM_TOP, typename Weight, typename Wanted>
    __device__ Range narrow(const Ruler& by, uint64_t low, const Weight& weight, const Wanted& wanted) {
        Range range = {low, ~uint64_t(0), 0, false};
        uint64_t base = 0, taken = 0;
        int shift = COARSE_SHIFT;
        for (bool is_first = true;; is_first = false) {
            if (!is_first) {
                uint64_t ends[2] = {0, 0};   // the highest; the complement of the lowest
                each([&](float v, int id) {
                    const uint64_t place = place_of(by, v, id);
                    if (place < range.low || place > range.high) return;
                    if (place > ends[0]) ends[0] = place;
                    if (~place > ends[1]) ends[1] = ~place;
                });
                all<false>(ends);
                range.low = base = ~ends[1];
                range.high = ends[0];
                // More than LISTED places, all different: the first and the last bucket are used, so every turn narrows.
                const int bits = 64 - leading_zeros(range.high - range.low);
                shift = bits > COARSE ? bits - COARSE : 0;
            }
            // Others may still read the buckets of the turn before, not those of the turn before that.
            Bucket* buckets = s.buckets[level++ & 1];
#pragma unroll 1
            for (int i = tid; i < BUCKETS; i += THREADS) buckets[i] = {0, {0, 0, 0}};
            __syncthreads();
            each([&](float v, int id) {
                const uint64_t place = place_of(by, v, id);
                if (place < range.low || place > range.high) return;
                Bucket& bucket = buckets[(place - base) >> shift];
                atomicAdd(&bucket.count, 1u);
                if constexpr (BY_WEIGHT) {
                    const uint64_t w = weight(v);
#pragma unroll
                    for (int i = 0; i < 3; ++i)
                        if (const uint32_t part = (uint32_t)(w >> 15 * i) & 0x7FFF) atomicAdd(&bucket.part[i], part);
                }
            });
            all_sync();
#pragma unroll 1
            for (int i = tid; i < BUCKETS; i += THREADS) {
                uint64_t sum = 0;
                uint32_t count = 0;
#pragma unroll
                for (int b = 0; b < CLUSTER; ++b) {
                    const Bucket of = *in_block(&buckets[i], b);
                    count += of.count;
                    sum += of.part[0] + ((uint64_t)of.part[1] << 15) + ((uint64_t)of.part[2] << 30);
                }
                s.sums[i] = BY_WEIGHT ? sum : count;
                s.counts[i] = count;
            }
            __syncthreads();
            // Every warp finds the bucket with the last one taken. A lane has EACH buckets in a row.
            constexpr int EACH = BUCKETS / 32;
            uint64_t own = 0;
#pragma unroll
            for (int i = 0; i < EACH; ++i) own += s.sums[lane * EACH + i];
            uint64_t upto = own;   // of the lane's buckets and all higher ones
            for (int i = 1; i < 32; i <<= 1) {
                const uint64_t more = __shfl_down_sync(~0u, upto, i);
                if (lane + i < 32) upto += more;
            }
            const uint64_t total = __shfl_sync(~0u, upto, 0);
            if (is_first) range.left = wanted(total);
            if (total < range.left) return {low, ~uint64_t(0), range.left, true};
            uint64_t above = upto - own;
            const uint32_t holds = __ballot_sync(~0u, above < range.left && upto >= range.left);
            int bucket = lane * EACH + EACH - 1;
#pragma unroll 1
            while (bucket > lane * EACH && above + s.sums[bucket] < range.left) above += s.sums[bucket--];
            const int who = __ffs(holds) - 1;
            bucket = __shfl_sync(~0u, bucket, who);
            above = __shfl_sync(~0u, above, who);
            const uint64_t first = base + ((uint64_t)bucket << shift), last = first + ((uint64_t(1) << shift) - 1);
            if (first > range.low) range.low = first;
            if (last < range.high) range.high = last;
            range.left -= above;
            taken += above;
            if ((FROM_TOP ? taken : 0) + s.counts[bucket] <= LISTED) return range;
        }
    }

    // Lists the tokens from low to high of all blocks, at most LISTED, in no order; how many. Lists are written again only after
    // a barrier that all reach when they have read them: the histogram's.
    template <typename Weight> __device__ int list(const Ruler& by, uint64_t low, uint64_t high, const Weight& weight) {
        if (tid == 0) s.num_listed = 0;
        __syncthreads();
        each([&](float v, int id) {
            const uint64_t place = place_of(by, v, id);
            if (place < low || place > high) return;
            const uint32_t at = atomicAdd(&s.num_listed, 1u);
            s.listed_places[at] = place;
            s.listed_weights[at] = weight(v);
        });
        all_sync();
        int count = 0;
#pragma unroll 1
        for (int b = 0; b < CLUSTER; ++b) {
            const int of = (int)*in_block(&s.num_listed, b);
#pragma unroll 1
            for (int i = tid; i < of; i += THREADS) {
                s.places[count + i] = *in_block(&s.listed_places[i], b);
                s.weights[count + i] = *in_block(&s.listed_weights[i], b);
            }
            count += of;
        }
        __syncthreads();
        return count;
    }

    // The place of the last token taken; `low` where there is less than was wanted.
    template <bool BY_WEIGHT, typename Weight, typename Wanted>
    __device__ uint64_t last_taken(const Ruler& by, uint64_t low, const Weight& weight, const Wanted& wanted) {
        const Range range = narrow<BY_WEIGHT, false>(by, low, weight, wanted);
        if (range.is_all) return low;
        const int count = list(by, range.low, range.high, weight);
#pragma unroll 1
        for (int i = tid; i < count; i += THREADS) {
            uint64_t upto = 0;
            for (int j = 0; j < count; ++j)
                if (s.places[j] >= s.places[i]) upto += s.weights[j];
            if (upto >= range.left && upto - s.weights[i] < range.left) s.found = s.places[i];
        }
        __syncthreads();
        return s.found;
    }
};

// The best token of all and the best allowed one, and the lowest logit: a thread's.
struct Best {
    float top = -INFINITY, top_allowed = -INFINITY, low_end = INFINITY;
    int top_id = 0, top_allowed_id = 0;
    bool is_broken = false;   // something is not finite
};

// Finds them in batches of logits, of which the first is in `v`, and keeps the logits where they are needed again. Ids rise, so of ties the
// lower one stays.
template <int CLUSTER, int THREADS, typename Load>
__device__ __forceinline__ Best find_best(const Row<CLUSTER, THREADS>& r, const float (&v)[BATCH], bool is_simple, bool is_masked, const Load& load) {
    Best best;
    for (int first = r.tid; first < r.mine;) {
#pragma unroll
        for (int i = 0; i < BATCH; ++i) {
            best.is_broken |= !(v[i] < INFINITY);
            if (v[i] > best.top) { best.top = v[i]; best.top_id = r.start + first + i * THREADS; }
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
                if (first + i * THREADS < r.mine) bits |= (uint32_t)r.is_allowed(r.start + first + i * THREADS) << i;
#pragma unroll
            for (int i = 0; i < BATCH; ++i)
                if (v[i] > best.top_allowed && bits >> i & 1) { best.top_allowed = v[i]; best.top_allowed_id = r.start + first + i * THREADS; }
        }
        first += BATCH * THREADS;
        if (first < r.mine) load(first);
    }
    if (!is_masked) { best.top_allowed = best.top; best.top_allowed_id = best.top_id; }
    return best;
}

// 0: none.
__device__ __forceinline__ uint64_t key_of(float v, int id) { return v > -INFINITY ? (uint64_t)order_of(v) << 32 | (uint32_t)~id : 0; }

// The same of penalised logits: the key of the best allowed one, the complement of the lowest.
template <int CLUSTER, int THREADS>
__device__ __forceinline__ void find_penalised(Row<CLUSTER, THREADS>& r, bool is_masked, uint64_t (&both)[2]) {
    float top_allowed = -INFINITY, low_end = INFINITY;
    int top_allowed_id = 0;
#pragma unroll 1
    for (int i = r.tid; i < r.mine; i += THREADS) {
        const float v = r.values[i];
        if (v > -INFINITY) low_end = fminf(low_end, v);
        if (v > top_allowed && (!is_masked || r.is_allowed(r.start + i))) { top_allowed = v; top_allowed_id = r.start + i; }
    }
    both[0] = key_of(top_allowed, top_allowed_id);
    both[1] = (uint32_t)~order_of(low_end);
    r.template all<false>(both);
}

// Writes the `num_top` best tokens with their log-probabilities. Returns how many there are.
template <int CLUSTER, int THREADS>
__device__ __forceinline__ int put_logprobs(Row<CLUSTER, THREADS>& r, int num_top, float best_of_all, float lowest, double log_total, int* out) {
    const Ruler by = ruler(best_of_all, best_of_all - lowest);
    const auto weight = [](float) { return uint64_t(1); };
    const auto range = r.template narrow<false, true>(by, 0, weight, [&](uint64_t) { return (uint64_t)num_top; });
    const int count = r.list(by, range.low, ~uint64_t(0), weight);
    const int listed = min(count, num_top);
    if (r.block == 0)
#pragma unroll 1
        for (int i = r.tid; i < count; i += THREADS) {
            int rank = 0;
            for (int j = 0; j < count; ++j) rank += r.s.places[j] > r.s.places[i];
            if (rank >= num_top) continue;
            out[4 + rank] = id_at(r.s.places[i]);
            out[4 + MAX_TOP + rank] = bits_as<int>(logprob_of(value_at(r.s.places[i]), best_of_all, log_total));
        }
    return listed;
}

// Draws a token: of those that top-k, top-p and min-p keep the one with the largest key.
template <int CLUSTER, int THREADS>
__device__ __forceinline__ int draw(Row<CLUSTER, THREADS>& r, const int64_t* settings, double temperature, bool is_masked, float best, float lowest) {
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
        low = r.template last_taken<false>(by, low, [](float) { return uint64_t(1); }, [&](uint64_t) { return (uint64_t)top_k; });
    if (top_p < 1) low = r.template last_taken<true>(by, low, weight, [&](uint64_t total) { return needed_of(total, top_p); });
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

template <int CLUSTER, int THREADS> __global__ void __launch_bounds__(THREADS) sample_kernel(const Sampling p) {
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
        for (int i = 0; i < BATCH; ++i) v[i] = first + i * THREADS < mine ? __ldcg(logits + first + i * THREADS) : -INFINITY;
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
    Row<CLUSTER, THREADS> r = {s, (float*)(&s + 1), logits, p.mask ? p.mask + (size_t)row * ((p.vocab + 31) / 32) : nullptr, start, mine, p.held};

    const Best found = find_best(r, v, is_simple, is_masked, load);
    // The largest of all numbers stands for something that is not finite.
    uint64_t ends[3] = {key_of(found.top_allowed, found.top_allowed_id), found.is_broken ? ~uint64_t(0) : key_of(found.top, found.top_id),
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

    if (temperature > 0 && forced < 0 && status == CHOSEN) id = draw(r, settings, temperature, is_masked, best, lowest);
    if (!is_simple) all_sync();   // no block leaves while another reads its memory
    if (block != 0) return;

    if (tid >= listed && tid < MAX_TOP) out[4 + tid] = out[4 + MAX_TOP + tid] = -1;
    if (tid == 0) {
        const bool has_logprob = num_top >= 0 && status == CHOSEN;
        out[0] = id;
        out[1] = has_logprob ? bits_as<int>(logprob_of(read(p.logits + (size_t)row * p.vocab + id), best_of_all, log_total)) : -1;
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
static_assert(sizeof(Block) == BLOCK_BYTES && BLOCK_BYTES + MOST_HELD * 4 <= 99 * 1024, "as decode.py has it, and no more than a block of sm_120 can have");
template __global__ void sample_kernel<8, 512>(const Sampling);
#endif
