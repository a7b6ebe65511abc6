// ops/attention/prefill_sm90.cu compiled for the CPU.
// What switches between threads is compiled to be fast, the kernels to be compiled fast.
#pragma GCC push_options
#pragma GCC optimize("O2")
#include "prompt_twin.h"
#pragma GCC pop_options

inline void show_tensor_core() { copies_may_follow(); }
inline std::map<const emulator::Thread*, std::vector<size_t>> groups;   // of copies: how many each has
inline void copy_chunk(uint32_t to, const void* from, int bytes) { copy_some<16>(to, from, bytes); }
inline void commit_copies() {
    size_t count = copies[emulator::now].size();
    for (const size_t before : groups[emulator::now]) count -= before;
    groups[emulator::now].push_back(count);
}
template <int PENDING> void await_copies() {
    std::vector<size_t>& its = groups[emulator::now];
    for (; its.size() > PENDING; its.erase(its.begin())) complete_copies(its[0]);
}
inline void multiply_keys(float (&d)[16], uint64_t q, uint64_t keys, int adds) {
    tensor::multiply(BF16_BF16, d, nullptr, {q}, {keys}, adds);
}
inline void multiply_values(float (&d)[128], uint64_t weights, uint64_t values) {
    tensor::multiply(BF16_BF16, d, nullptr, {weights}, {values, true}, true);
}
inline bool __any_sync(uint32_t all, bool v) { return __ballot_sync(all, v); }
template <typename T> void __stcg(T* p, T v) { *p = v; }

#include "attention/prefill_sm90.cu"

LAUNCH(groups.clear();
       CASE("attend_kernel<0>", attend_kernel<0>, Attend) CASE("attend_kernel<1>", attend_kernel<1>, Attend)
           CASE("attend_kernel<2>", attend_kernel<2>, Attend)
               CASE("attend_kernel<3>", attend_kernel<3>, Attend))
