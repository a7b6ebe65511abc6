// What the lanes of a warp exchange, and atomics, in the emulator.
#pragma once

template <typename T> T __ldcg(const T* p) { return *p; }
inline int __ffs(uint32_t n) { return __builtin_ffs((int)n); }
inline int __clz(uint32_t n) { return n ? __builtin_clz(n) : 32; }
inline int __popc(uint32_t n) { return __builtin_popcount(n); }
template <typename T, typename F> T atomically(T* p, F next) {
    races::touch(p, sizeof(T), races::ATOMIC, __builtin_return_address(0));
    const races::Aside aside;
    const T before = *p;
    *p = next(before);
    return before;
}
template <typename T> T atomicAdd(T* p, T v) {
    return atomically(p, [&](T old) { return old + v; });
}
inline uint32_t atomicMin(uint32_t* p, uint32_t v) {
    return atomically(p, [&](uint32_t old) { return min(old, v); });
}
inline uint32_t atomicMax(uint32_t* p, uint32_t v) {
    return atomically(p, [&](uint32_t old) { return max(old, v); });
}
inline uint32_t atomicOr(uint32_t* p, uint32_t v) {
    return atomically(p, [&](uint32_t old) { return old | v; });
}

inline uint32_t __reduce_max_sync(uint32_t, uint32_t v) {
    uint32_t all[32];
    emulator::together("reduce_max", v, all);
    return *std::max_element(all, all + 32);
}
inline uint32_t __reduce_min_sync(uint32_t, uint32_t v) {
    uint32_t all[32];
    emulator::together("reduce_min", v, all);
    return *std::min_element(all, all + 32);
}
inline uint32_t __reduce_add_sync(uint32_t, uint32_t v) {
    uint32_t all[32], sum = 0;
    emulator::together("reduce_add", v, all);
    for (uint32_t one : all) sum += one;
    return sum;
}
inline uint32_t __match_any_sync(uint32_t, uint32_t v) {
    uint32_t all[32], bits = 0;
    emulator::together("match_any", v, all);
    for (int i = 0; i < 32; ++i) bits |= (uint32_t)(all[i] == v) << i;
    return bits;
}
inline uint32_t __ballot_sync(uint32_t, bool v) {
    uint32_t all[32], bits = 0;
    emulator::together("ballot", (uint32_t)v, all);
    for (int i = 0; i < 32; ++i) bits |= all[i] << i;
    return bits;
}
template <typename T> T __shfl_sync(uint32_t, T v, int from) {
    T all[32];
    emulator::together("shfl", v, all);
    return all[from & 31];
}
template <typename T> T __shfl_xor_sync(uint32_t, T v, int with) {
    T all[32];
    emulator::together("shfl_xor", v, all);
    return all[emulator::now->index % 32 ^ with];
}
template <typename T> T __shfl_up_sync(uint32_t, T v, int by) {
    T all[32];
    emulator::together("shfl_up", v, all);
    return all[max(emulator::now->index % 32 - by, 0)];
}
template <typename T> T __shfl_down_sync(uint32_t, T v, int by) {
    T all[32];
    emulator::together("shfl_down", v, all);
    return all[min(emulator::now->index % 32 + by, 31)];
}
