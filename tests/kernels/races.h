// Finds accesses to shared memory, and to arrays that are watched, that nothing orders. g++ -fsanitize=thread calls a function at
// every load and store; races.cpp has those functions, no library. What orders threads tells so (emulator.h): barriers of any size,
// __syncwarp, an inbox or a copy's barrier that was awaited. Shuffles, votes and products of a warp order nothing, as CUDA has it.
#pragma once
#include <stddef.h>
#include <stdint.h>

#include <memory>
#include <utility>
#include <vector>

namespace races {
typedef std::vector<uint32_t> Clocks;   // by thread: up to when what it did is known
typedef std::shared_ptr<const Clocks> Known;
constexpr size_t STACK = 32 << 10;
struct Observer {
    int index;
    uint32_t clock;      // counts what it has told others
    Known known;
    const char* stack;   // its own, of STACK bytes
};
enum Kind : uint8_t { READ, ATOMIC, WRITE };

extern Observer* observer;   // whose accesses these are; null: nobody's
extern char found[200];      // the first race
// Where this library's thread_local variables lie.
std::pair<const void*, size_t> variables();
// Where to look, from now on.
void watch(const std::vector<std::pair<const void*, size_t>>& arrays);
// `as`, `when`: a copy that goes on by itself is someone else, by its own clock.
void touch(const void* at, size_t bytes, Kind kind, const void* by, int as, uint32_t when);
void touch(const void* at, size_t bytes, Kind kind);

// The tensor core reads shared memory by a way of its own (the async proxy): what a thread wrote, it has to show before others may
// have it multiplied.
extern bool looks_for_hidden;
void show(const Observer& its);
bool is_hidden(const void* at, size_t bytes);

// What several have told.
struct Told {
    std::vector<Known> of;
    std::vector<std::pair<int, uint32_t>> clocks;
    void add(Observer& its, bool all);   // else only what it knows itself
    Known all() const;
};
// From now on it knows this of one thread.
void hear(Observer& its, int index, uint32_t clock);
void hear(Observer& its, const Known& all);

// While it lives accesses are the emulator's own.
struct Aside {
    Observer* before;
    Aside();
    ~Aside();
};
}  // namespace races
