// Decode step: the arithmetic of ops/sample/cpu.py, one number at a time. Doubles are added, multiplied and
// divided one operation after the other, never fused, so that a GPU, a CPU and torch give the same bits. A
// host compiler takes this file too (with -ffp-contract=off): that is how it is tested without a GPU.
#pragma once
#ifdef __CUDACC__
#include "types.cuh"
#define BOTH __host__ __device__ __forceinline__
#else
#include <math.h>
#include <stdint.h>
#include <string.h>
#define BOTH static inline
#endif

template <typename To, typename From> BOTH To bits_as(From from) {
    static_assert(sizeof(To) == sizeof(From), "the same bits");
    To to;
    memcpy(&to, &from, sizeof(To));
    return to;
}

#ifdef __CUDA_ARCH__
BOTH double add(double a, double b) { return __dadd_rn(a, b); }
BOTH double mul(double a, double b) { return __dmul_rn(a, b); }
BOTH double div(double a, double b) { return __ddiv_rn(a, b); }
BOTH float add(float a, float b) { return __fadd_rn(a, b); }
BOTH float mul(float a, float b) { return __fmul_rn(a, b); }
BOTH float div(float a, float b) { return __fdiv_rn(a, b); }
BOTH int leading_zeros(uint64_t n) { return __clzll((long long)n); }
#else
BOTH double add(double a, double b) { return a + b; }
BOTH double mul(double a, double b) { return a * b; }
BOTH double div(double a, double b) { return a / b; }
BOTH float add(float a, float b) { return a + b; }
BOTH float mul(float a, float b) { return a * b; }
BOTH float div(float a, float b) { return a / b; }
BOTH int leading_zeros(uint64_t n) { return n ? __builtin_clzll(n) : 64; }
#endif

constexpr double LN2_HIGH = 6.93147180369123816490e-01, LN2_LOW = 1.90821492927058770002e-10;
constexpr int64_t ONE = int64_t(1) << 44;   // the best token's weight
constexpr int VOCAB_BITS = 18;
constexpr uint64_t GOLDEN = 0x9E3779B97F4A7C15u;

// exp(x) * 2^44, cut to an integer, for x <= 0.
BOTH int64_t weight_of(double x) {
    if (!(x >= -31.0)) return 0;
    const double k = rint(mul(x, 1.4426950408889634));
    const double r = add(add(x, -mul(k, LN2_HIGH)), -mul(k, LN2_LOW));
    double exp = 1.0 / 479001600;
    exp = add(mul(exp, r), 1.0 / 39916800);
    exp = add(mul(exp, r), 1.0 / 3628800);
    exp = add(mul(exp, r), 1.0 / 362880);
    exp = add(mul(exp, r), 1.0 / 40320);
    exp = add(mul(exp, r), 1.0 / 5040);
    exp = add(mul(exp, r), 1.0 / 720);
    exp = add(mul(exp, r), 1.0 / 120);
    exp = add(mul(exp, r), 1.0 / 24);
    exp = add(mul(exp, r), 1.0 / 6);
    exp = add(mul(exp, r), 1.0 / 2);
    exp = add(mul(exp, r), 1.0);
    exp = add(mul(exp, r), 1.0);
    return (int64_t)mul(exp, bits_as<double>(((int64_t)k + 1023 + 44) << 52));
}

// The natural logarithm of a positive normal double.
BOTH double log_of(double y) {
    const int64_t bits = bits_as<int64_t>(y);
    double m = bits_as<double>((bits & ((int64_t(1) << 52) - 1)) | int64_t(1023) << 52);
    int64_t e = (bits >> 52) - 1023;
    if (m > 1.4142135623730951) {
        m = mul(m, 0.5);
        ++e;
    }
    const double s = div(add(m, -1.0), add(m, 1.0)), square = mul(s, s), exponent = (double)e;
    double log = 2.0 / 21;
    log = add(mul(log, square), 2.0 / 19);
    log = add(mul(log, square), 2.0 / 17);
    log = add(mul(log, square), 2.0 / 15);
    log = add(mul(log, square), 2.0 / 13);
    log = add(mul(log, square), 2.0 / 11);
    log = add(mul(log, square), 2.0 / 9);
    log = add(mul(log, square), 2.0 / 7);
    log = add(mul(log, square), 2.0 / 5);
    log = add(mul(log, square), 2.0 / 3);
    log = add(mul(log, square), 2.0);
    return add(mul(exponent, LN2_HIGH), add(mul(s, log), mul(exponent, LN2_LOW)));
}

BOTH uint64_t mix(uint64_t z) {
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}
BOTH uint64_t noise_base(uint64_t seed, uint64_t index) {
    return mix(mix(seed + GOLDEN) + index * 0xD1B54A32D192ED03u);
}
// 1 to 2^53 - 1.
BOTH uint64_t random_bits(uint64_t base, int id) {
    const uint64_t n = mix(base + (uint64_t)(id + 1) * GOLDEN) >> 11;
    return n ? n : 1;
}
BOTH double gumbel(uint64_t n) {
    const double u = add(1.0, -mul((double)(int64_t)n, 0x1p-53));
    return -log_of(-log_of(u));
}

BOTH double distance(float v, float best) { return add((double)v, -(double)best); }
BOTH double exact_key(float v, float best, double temperature, uint64_t n) {
    return add(div(distance(v, best), temperature), gumbel(n));
}
BOTH float logprob_of(float v, float best, double log_total) {
    return (float)add(distance(v, best), -log_total);
}
BOTH double log_of_total(uint64_t total) { return log_of(mul((double)(int64_t)total, 0x1p-44)); }

// Of a total weight, so much reaches top_p.
BOTH uint64_t needed_of(uint64_t total, double top_p) {
    const int64_t needed = (int64_t)ceil(mul((double)(int64_t)total, top_p)), most = (int64_t)total;
    return (uint64_t)(needed < 1 ? 1 : needed > most ? most : needed);
}
BOTH int64_t least_weight(double min_p) { return (int64_t)ceil(mul(min_p, (double)ONE)); }

// `seen`: how often a token was generated, and whether the prompt has it.
constexpr uint32_t IN_PROMPT = 1u << 31;
struct Penalties {
    float presence, frequency, repetition;
};
BOTH float penalised(float logit, float bias, uint32_t seen, const Penalties& how) {
    if (!(logit > -INFINITY)) return logit;
    const uint32_t count = seen & ~IN_PROMPT;
    float v = add(add(logit, 0.f), bias);
    if (seen) v = v > 0.f ? div(v, how.repetition) : mul(v, how.repetition);
    v = add(v, -mul(how.frequency, (float)count));
    if (count) v = add(v, -how.presence);
    return add(fminf(fmaxf(v, -3.4028234663852886e38f), 3.4028234663852886e38f),
               0.f);   // finite ones stay finite
}

// Estimates in float32 of keys, to leave the exact ones to few tokens. Errors, for x >= MIN_X: 1.7e-7 of the
// polynomial and a few 2^-24 relative to E, so absolute in g = -ln E; |g| < 37 with its exponent's product
// rounded: 3e-6; x rounded: 45 * 2^-24; the sum: 82 * 2^-24. Together below 2e-5.
constexpr float KEY_ERROR = 1e-4f;
// Noise lies in (-3.62, 36.74), so a token this far below the best, whose x is 0, can never be chosen.
constexpr double MIN_X = -45.0;

// ln(1 + f) for 1 + f from sqrt(1/2) to sqrt(2).
BOTH float log1p_estimate(float f) {
    float p = -0.10106863081455231f;
    p = fmaf(p, f, 0.1622256636619568f);
    p = fmaf(p, f, -0.1725083440542221f);
    p = fmaf(p, f, 0.19900166988372803f);
    p = fmaf(p, f, -0.24969908595085144f);
    p = fmaf(p, f, 0.33335059881210327f);
    p = fmaf(p, f, -0.5000036358833313f);
    p = fmaf(p, f, 0.9999999403953552f);
    return p * f;
}
BOTH float log_estimate(float y) {
    const uint32_t bits = bits_as<uint32_t>(y);
    const int e = (int)(bits - 0x3F3504F3u) >> 23;   // 0 from sqrt(1/2) on
    return fmaf((float)e, 0.6931471805599453f,
                log1p_estimate(bits_as<float>(bits - ((uint32_t)e << 23)) - 1.f));
}
BOTH float gumbel_estimate(uint64_t n) {
    // Which of v = n / 2^53 and u = 1 - v is known well enough decides the way to E = -ln u.
    const bool is_small = n < 0x095F619980C433u;   // v below 1 - sqrt(1/2)
    const float part = (float)(int64_t)(is_small ? n : (uint64_t(1) << 53) - n) * 0x1p-53f;
    return -log_estimate(is_small ? -log1p_estimate(-part) : -log_estimate(part));
}
// x without a division, and the key with it.
BOTH double inverse_of(double temperature) { return fmin(1.0 / temperature, 1.7976931348623157e308); }
BOTH double x_estimate(float v, float best, double inverse) { return mul(distance(v, best), inverse); }
BOTH float key_estimate(double x, uint64_t n) { return (float)x + gumbel_estimate(n); }

// Larger floats have larger keys; both zeros have one.
BOTH uint32_t order_of(float v) {
    const uint32_t bits = bits_as<uint32_t>(v == 0.f ? 0.f : v);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
BOTH float value_of(uint32_t order) {
    return bits_as<float>(order & 0x80000000u ? order & 0x7FFFFFFFu : ~order);
}
BOTH uint64_t order_of(double v) {
    const uint64_t bits = bits_as<uint64_t>(add(v, 0.0));
    return bits >> 63 ? ~bits : bits | uint64_t(1) << 63;
}

// A token's place in the order "larger logits first, then lower ids" as one number, no two alike. Its first
// eight bits are a coarse share of the distance to the best, which spreads tokens evenly: rounded differences
// and products keep the order, so these bits never contradict the logit's own below them.
constexpr int COARSE = 8, COARSE_SHIFT = 32 + VOCAB_BITS;
struct Ruler {
    float best, scale;
};
BOTH Ruler ruler(float best, float span) {
    const float bounded = fminf(fmaxf(span, 1e-30f), 3e38f);
    return {best, ((1 << COARSE) - 1) / bounded};
}
BOTH uint64_t place_of(const Ruler& ruler, float v, int id) {
    const int below = (int)fminf((ruler.best - v) * ruler.scale, (float)((1 << COARSE) - 1));
    return (uint64_t)((1 << COARSE) - 1 - below) << COARSE_SHIFT | (uint64_t)order_of(v) << VOCAB_BITS |
           (uint64_t)((1 << VOCAB_BITS) - 1 - id);
}
BOTH int id_at(uint64_t place) { return (1 << VOCAB_BITS) - 1 - (int)(place & ((1 << VOCAB_BITS) - 1)); }
BOTH float value_at(uint64_t place) { return value_of((uint32_t)(place >> VOCAB_BITS)); }
