// ops/linear/matvec.cu compiled for the CPU: block after block, in a shuffled order.
// What switches between threads is compiled to be fast, the kernels to be compiled fast.
#pragma GCC push_options
#pragma GCC optimize("O2")
#include "bulk_twin.h"
#pragma GCC pop_options

// Every line of what is prefetched, once.
inline std::map<const char*, int> prefetched;
inline void prefetch_line(const void* from) { ++prefetched[(const char*)from]; }
inline void prefetch(const void* from, int bytes) { bulk::is_readable(from, bytes); }

#include "linear/matvec.cu"

namespace {
// What may be read, or written, only after the wait: until then it holds something else, and what is written
// is lost.
struct Late {
    std::vector<bulk::Range> ranges;
    std::vector<std::vector<char>> saved;
    explicit Late(std::vector<bulk::Range> given) : ranges(std::move(given)) {
        for (const bulk::Range& range : ranges) saved.emplace_back(range.at, range.at + range.bytes);
        for (const bulk::Range& range : ranges) memset((char*)range.at, 0xFF, range.bytes);
    }
    void restore() const {
        for (size_t i = 0; i < ranges.size(); ++i)
            memcpy((char*)ranges[i].at, saved[i].data(), saved[i].size());
    }
};

const char* run_block(const Params& p, void (*kernel)(const Params), int block, int threads, int bytes,
                      const std::vector<bulk::Range>& late, unsigned seed, bool& has_waited) {
    memset(shared, 0xFF, sizeof shared);
    emulator::variables = {{shared, (size_t)bytes}};
    bulk::stages.clear();
    bulk::flights.clear();
    bulk::random.seed(seed + block + 1);
    copies.clear();
    const Late held(late);
    bool is_complete = false;
    emulator::complete_prerequisites = [&] {
        for (const emulator::Thread& thread : emulator::threads)
            if (thread.has_triggered == (bool)p.triggers_late)
                emulator::fail("dependents are launched otherwise than declared");
        held.restore();
        is_complete = true;
    };
    const char* problem = emulator::run(block, 1, threads, bytes, seed + block, [&] { kernel(p); });
    emulator::complete_prerequisites = nullptr;
    if (!is_complete) held.restore();
    has_waited |= is_complete;
    if (*problem) return problem;
    return bulk::left_behind();
}
}   // namespace

// `late`: what is read or written after the wait, `readable`: whatever copies may read.
extern "C" const char* launch(const void* params, const char* kernel, int blocks, int threads, int bytes,
                              const bulk::Range* late, int num_late, const bulk::Range* readable,
                              int num_readable, unsigned seed) {
    const Params& p = *(const Params*)params;
    static const std::map<std::string, void (*)(const Params)> kernels = {
        {"batch_kernel<false, false, false>", batch_kernel<false, false, false>},
        {"batch_kernel<false, false, true>", batch_kernel<false, false, true>},
        {"batch_kernel<false, true, false>", batch_kernel<false, true, false>},
        {"batch_kernel<false, true, true>", batch_kernel<false, true, true>},
        {"batch_kernel<true, false, false>", batch_kernel<true, false, false>},
        {"batch_kernel<true, false, true>", batch_kernel<true, false, true>},
        {"single_kernel<false>", single_kernel<false>},
        {"single_kernel<true>", single_kernel<true>},
    };
    bulk::blocks = blocks;
    bulk::readable.assign(readable, readable + num_readable);
    prefetched.clear();
    std::vector<races::Array> watched;
    for (int i = 0; i < num_late; ++i) watched.push_back({late[i].at, (size_t)late[i].bytes});
    races::watch(watched);
    bool has_waited = false;
    std::vector<int> order(blocks);
    for (int i = 0; i < blocks; ++i) order[i] = i;
    std::shuffle(order.begin(), order.end(), std::mt19937(seed));
    for (const int block : order) {
        const char* problem = run_block(p, kernels.at(kernel), block, threads, bytes, {late, late + num_late},
                                        seed, has_waited);
        if (*problem) return problem;
    }
    if (!has_waited) return "no block waits for the launches before this one";
    for (int64_t at = 0; at < p.prefetch_bytes; at += 128)
        if (prefetched[p.prefetch + at] != 1) return "a line is not prefetched, or twice";
    return (int64_t)prefetched.size() * 128 < p.prefetch_bytes + 128 ? "" : "too much is prefetched";
}
