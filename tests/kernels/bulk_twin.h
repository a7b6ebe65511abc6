// gpu/tiles.cuh and ops/linear/block.cuh, what they take from the GPU, on the CPU: conversions, and copies to
// shared memory behind barriers. For one block at a time.
#pragma once
#include "round_twin.h"

#undef __shared__
#define __shared__
#define __align__(bytes)
#define __noinline__
#define __grid_constant__
#define blockDim (emulator::Index{emulator::threads_per_block})
#define gridDim (bulk::Grid{bulk::blocks})

// The one block's dynamic shared memory.
constexpr int SHARED_BYTES = 227 << 10;
alignas(1024) char shared[SHARED_BYTES];

inline uint4 stream(const uint4* p) { return *p; }
inline float e8m0(uint32_t code) { return __uint_as_float(code << 23 | (code == 0 || code == 255) << 22); }
inline __half2 __low2half2(__half2 v) { return {(v.bits & 0xFFFF) * 0x10001u}; }
inline __half2 __high2half2(__half2 v) { return {(v.bits >> 16) * 0x10001u}; }
inline float2 __half22float2(__half2 v) {
    return {f16_value((uint16_t)v.bits), f16_value((uint16_t)(v.bits >> 16))};
}
inline float at_most(float v, float limit) { return v > limit ? limit : v; }
inline float at_least(float v, float limit) { return v < limit ? limit : v; }

namespace bulk {
struct Range {
    const char* at;
    int64_t bytes;
    bool has(const void* from, int64_t count) const {
        return (const char*)from >= at && (const char*)from + count <= at + bytes;
    }
};
struct Stage {                    // an mbarrier
    int count = 0, arrived = 0;   // count 0: it is not open
    uint32_t phase = 0;
    int64_t missing = 0;   // bytes; below 0 where copies were quicker than who announces them
    races::Told told;      // by those that arrived
};
struct Flight {
    char* to;
    const char* from;
    int bytes;
    uint32_t barrier;
};
struct Grid {
    int x, z = 1;
};
inline int blocks;   // of the launch
inline std::vector<Range> readable;
inline std::map<uint32_t, Stage> stages;
inline std::vector<Flight> flights;
inline std::minstd_rand random;
constexpr uint32_t BASE = 1 << 20;   // of shared memory's addresses
constexpr uint64_t MARK = 0x6D62617272696572;

// Barriers tell races.h when copies are complete; how they themselves lie in memory is no thread's.
inline char* place_of(uint32_t address, int bytes) {
    if (address >= BASE && address - BASE + bytes <= emulator::blocks[0].memory.size())
        return shared + (address - BASE);
    emulator::fail("an address outside shared memory");
    return nullptr;
}
inline bool is_readable(const void* from, int64_t bytes) {
    for (const Range& range : readable)
        if (range.has(from, bytes)) return true;
    emulator::fail("a copy of what is not the launch's to read");
    return false;
}
// A barrier is marked in shared memory, too: who writes there is found out.
inline Stage* stage_of(uint32_t address) {
    const races::Aside aside;
    const char* at = place_of(address, 8);
    if (at && stages[address].count && *(const uint64_t*)at == MARK) return &stages[address];
    emulator::fail("a barrier that is not open, or was overwritten");
    return nullptr;
}
inline void turn(Stage& stage) {
    if (stage.arrived < stage.count || stage.missing) return;
    stage.arrived = 0;
    ++stage.phase;
    ++emulator::epochs;
    stage.told.settle();
}
// What an arriving thread did before, whoever awaits the barrier knows. What it does next may come after all
// others' next steps.
inline void arrive(uint32_t barrier, int64_t bytes) {
    Stage* stage = stage_of(barrier);
    if (!stage) return;
    if (stage->arrived == stage->count) return emulator::fail("more arrive at a barrier than it waits for");
    ++stage->arrived;
    stage->missing += bytes;
    stage->told.add(emulator::now->observer);
    turn(*stage);
    emulator::yield(false);
}
// What lies at the source now: who overwrites it meanwhile is found out.
inline void deliver(size_t i) {
    std::swap(flights[i], flights.back());
    const Flight flight = flights.back();
    flights.pop_back();
    memcpy(flight.to, flight.from, flight.bytes);
    if (Stage* stage = stage_of(flight.barrier)) {
        stage->missing -= flight.bytes;
        turn(*stage);
    }
}
// Until a copy is delivered its bytes are NaN's. It comes when its barrier is awaited, rarely before.
inline void copy(uint32_t to, const void* from, int bytes, uint32_t barrier) {
    Stage* stage = stage_of(barrier);
    char* at = place_of(to, bytes);
    if (!stage || !at || !is_readable(from, bytes)) return;
    if (to % 16 || (uintptr_t)from % 16 || bytes % 16) emulator::fail("a bulk copy that is not aligned");
    for (const Flight& other : flights)
        if (at < other.to + other.bytes && other.to < at + bytes)
            return emulator::fail("two copies to one place");
    emulator::mailbox(stage).clock = stage->phase;
    emulator::post(stage, at, from, bytes);
    memset(at, 0xFF, bytes);
    flights.push_back({at, (const char*)from, bytes, barrier});
    emulator::yield(false);
}
inline void open(uint32_t barrier, int count) {
    const races::Aside aside;
    char* at = place_of(barrier, 8);
    if (!at) return;
    if (stages[barrier].count) emulator::fail("a barrier is opened twice");
    stages[barrier].count = count;
    memcpy(at, &MARK, 8);
}
// What a block must not leave behind.
inline const char* left_behind() {
    if (!flights.empty()) return "a block leaves while copies are on their way";
    for (const auto& [address, stage] : stages)
        if (*(const uint64_t*)(shared + (address - BASE)) != MARK) return "a barrier was overwritten";
    return "";
}
}   // namespace bulk

inline uint32_t shared_address(const void* p) { return bulk::BASE + (uint32_t)((const char*)p - shared); }
template <int BYTES> void copy_some(uint32_t to, const void* from, int bytes) {
    char* at = bulk::place_of(to, BYTES);
    if (to % BYTES || (uintptr_t)from % BYTES) emulator::fail("a copy that is not aligned");
    if (at && bulk::is_readable(from, bytes)) copy_some(at, from, bytes, BYTES);
}
inline void open_barrier(uint32_t barrier, int count = 1) { bulk::open(barrier, count); }
inline void arrive(uint32_t barrier) { bulk::arrive(barrier, 0); }
inline void arrive_expecting(uint32_t barrier, uint32_t bytes) { bulk::arrive(barrier, bytes); }
inline void copy_bulk(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier) {
    bulk::copy(to, from, (int)bytes, barrier);
}
inline void copies_see_barriers() {}
template <int CHUNK> void fetch(uint32_t to, const void* from, uint32_t barrier) {
    bulk::arrive(barrier, CHUNK);
    bulk::copy(to, from, CHUNK, barrier);
}
inline void await(uint32_t barrier, uint32_t parity) {
    for (;;) {
        bulk::Stage* stage = bulk::stage_of(barrier);
        if (!stage) return;
        if (stage->phase % 2 != parity) {
            emulator::mailbox(stage).clock = stage->phase;
            stage->told.tell(emulator::now->observer);
            return emulator::collect(stage);
        }
        bool is_coming = false;
        for (size_t i = 0; i < bulk::flights.size() && !is_coming; ++i) {
            is_coming = bulk::flights[i].barrier == barrier;
            if (is_coming) bulk::deliver(i);
        }
        if (!bulk::flights.empty() && bulk::random() % 64 == 0)
            bulk::deliver(bulk::random() % bulk::flights.size());
        if (!is_coming) emulator::yield(true);
    }
}
