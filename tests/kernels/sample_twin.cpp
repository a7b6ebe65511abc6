// ops/sample/decode.cu and its arithmetic, compiled for the CPU.
#include "emulator.h"
#include "sample/decode.cu"

extern "C" {
void weights(const double* x, int64_t n, int64_t* out) {
    for (int64_t i = 0; i < n; ++i) out[i] = weight_of(x[i]);
}
void logs(const double* y, int64_t n, double* out) {
    for (int64_t i = 0; i < n; ++i) out[i] = log_of(y[i]);
}
void noise(uint64_t seed, int64_t index, int64_t n, double* out) {
    const uint64_t base = noise_base(seed, (uint64_t)index);
    for (int64_t i = 0; i < n; ++i) out[i] = gumbel(random_bits(base, (int)i));
}
void penalise(const float* logits, const float* bias, const uint32_t* seen, int64_t n, float presence,
              float frequency, float repetition, float* out) {
    for (int64_t i = 0; i < n; ++i)
        out[i] = penalised(logits[i], bias[i], seen[i], {presence, frequency, repetition});
}
// By how much the estimates of keys are off, with these random bits.
double worst_estimate(const float* values, float best, double temperature, const int64_t* bits, int64_t n) {
    double worst = 0;
    for (int64_t i = 0; i < n; ++i) {
        const double x = x_estimate(values[i], best, inverse_of(temperature));
        if (!(x >= MIN_X)) continue;
        worst = fmax(worst, fabs((double)key_estimate(x, (uint64_t)bits[i]) -
                                 exact_key(values[i], best, temperature, (uint64_t)bits[i])));
    }
    return worst;
}
void places(float best, float span, const float* values, int64_t n, int64_t* out) {
    const Ruler by = ruler(best, span);
    for (int64_t i = 0; i < n; ++i) out[i] = (int64_t)place_of(by, values[i], (int)i);
}
void orders(const double* values, int64_t n, uint64_t* out) {
    for (int64_t i = 0; i < n; ++i) out[i] = order_of(values[i]);
}

// As the launcher asks for it.
const char* launch(const void* params, int blocks, int shared, unsigned seed) {
    for (int first = 0; first < blocks; first += 8) {
        const char* problem = emulator::run(first, 8, 512, shared, seed + first,
                                            [&] { sample_kernel<8, 512>(*(const Sampling*)params); });
        if (*problem) return problem;
    }
    return "";
}
const char* sample(int cluster, const float* logits, int rows, int vocab, int64_t* settings,
                   const uint32_t* mask, int* out, int64_t* next_ids, int64_t* positions, int* penalties,
                   int penalty_width, int most_held, unsigned seed) {
    constexpr int THREADS = 64;
    const int slice = ((vocab + cluster - 1) / cluster + 31) / 32 * 32;
    Sampling p = {logits, vocab, settings, mask, out, next_ids, positions};
    p.penalties = penalties;
    p.penalty_width = penalty_width;
    p.slice = slice;
    p.held = min(slice, most_held);
    for (int row = 0; row < rows; ++row) {
        const char* problem = cluster == 8 ? emulator::run(row * 8, 8, THREADS,
                                                           sizeof(Memory<8, THREADS>) + p.held * 4, seed,
                                                           [&] { sample_kernel<8, THREADS>(p); })
                                           : emulator::run(row * 2, 2, THREADS,
                                                           sizeof(Memory<2, THREADS>) + p.held * 4, seed,
                                                           [&] { sample_kernel<2, THREADS>(p); });
        if (*problem) return problem;
    }
    return "";
}
}
