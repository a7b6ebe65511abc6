// What the twins of prompts' kernels share: a launch is called by its kernel's name, and runs block after block, in a shuffled order.
#pragma once
#include "bulk_twin.h"

#include <string>

inline float __fdividef(float a, float b) { return a / b; }

namespace prompt {
struct Launch {
    std::string kernel;   // as its launcher names it
    int blocks, threads, bytes;
    unsigned seed;
};
// Every block finds noise in shared memory.
template <typename F> const char* run(const Launch& how, F body) {
    bulk::blocks = how.blocks;
    std::vector<int> order(how.blocks);
    for (int i = 0; i < how.blocks; ++i) order[i] = i;
    std::shuffle(order.begin(), order.end(), std::mt19937(how.seed));
    for (const int block : order) {
        memset(shared, 0xFF, sizeof shared);
        emulator::arrays = {{shared, (size_t)how.bytes}};
        const char* problem = emulator::run(block, 1, how.threads, 0, how.seed + block, body);
        if (*problem) return problem;
    }
    return "";
}
}  // namespace prompt

// The entry of every such twin: CASES are `if (how.kernel == NAME) return prompt::run(how, [&] { call; });`
#define LAUNCH(CASES)                                                                                                            \
    extern "C" const char* launch(const char* kernel, const void* params, int blocks, int threads, int bytes, unsigned seed) { \
        const prompt::Launch how = {kernel, blocks, threads, bytes, seed};                                                       \
        CASES                                                                                                                    \
        return "no such kernel";                                                                                                 \
    }
#define CASE(NAME, KERNEL, PARAMS) \
    if (how.kernel == NAME) return prompt::run(how, [&] { KERNEL(*(const PARAMS*)params); });
