// What the twins of prompts' kernels share: a launch is called by its kernel's name, and runs block after
// block, in a shuffled order.
#pragma once
#include "wgmma_twin.h"

#include <string>

inline float __fdividef(float a, float b) { return a / b; }
template <int NUMBER, int COUNT> void some_threads_meet() { group_barrier(NUMBER, COUNT); }
template <int COUNT> void keep_registers() {}
template <int COUNT> void take_registers() {}

namespace prompt {
struct Launch {
    std::string kernel;   // as its launcher names it
    int blocks, threads, bytes;
    unsigned seed;
};
inline std::vector<bulk::Range> allowed;   // to copies; none: all
// Every block finds noise in shared memory.
template <typename F> const char* run(const Launch& how, F body) {
    bulk::blocks = how.blocks;
    bulk::readable = allowed;
    if (allowed.empty()) bulk::readable = {{nullptr, (int64_t)1 << 62}};
    std::vector<int> order(how.blocks);
    for (int i = 0; i < how.blocks; ++i) order[i] = i;
    std::shuffle(order.begin(), order.end(), std::mt19937(how.seed));
    for (const int block : order) {
        memset(shared, 0xFF, sizeof shared);
        emulator::variables = {{shared, (size_t)how.bytes}};
        bulk::stages.clear();
        bulk::flights.clear();
        bulk::random.seed(how.seed + block + 1);
        copies.clear();
        tensor::start();
        const char* problem = emulator::run(block, 1, how.threads, how.bytes, how.seed + block, body);
        for (const char* other : {bulk::left_behind(), tensor::left_behind()})
            problem = *problem ? problem : other;
        if (*problem) return problem;
    }
    return "";
}
}   // namespace prompt

// What copies may read, from now on; nothing: anything.
extern "C" void allow(const void* at, int64_t bytes) {
    if (bytes) prompt::allowed.push_back({(const char*)at, bytes});
    else prompt::allowed.clear();
}

// The entry of every such twin: CASES are `if (how.kernel == NAME) return prompt::run(how, [&] { call; });`
#define LAUNCH(CASES)                                                                              \
    extern "C" const char* launch(const char* kernel, const void* params, int blocks, int threads, \
                                  int bytes, unsigned seed) {                                      \
        const prompt::Launch how = {kernel, blocks, threads, bytes, seed};                         \
        CASES                                                                                      \
        return "no such kernel";                                                                   \
    }
#define CASE(NAME, KERNEL, PARAMS) \
    if (how.kernel == NAME) return prompt::run(how, [&] { KERNEL(*(const PARAMS*)params); });
