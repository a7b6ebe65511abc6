// Finds accesses to shared memory, and to arrays that are watched, that nothing orders. g++ -fsanitize=thread
// calls a function at every load and store; races.cpp has those functions, no library. What orders threads
// tells so (emulator.h): barriers of any size,
// __syncwarp, an inbox or a copy's barrier that was awaited. Shuffles, votes and products of a warp order
// nothing, as CUDA has it.
#pragma once
#include <stddef.h>
#include <stdint.h>

#include <map>
#include <memory>
#include <utility>
#include <vector>

namespace races {
// By index: up to when what it did is known. Each thread has two, for its own block's shared memory and for
// all else; then come copies.
typedef std::vector<uint32_t> Clocks;
typedef std::shared_ptr<const Clocks> Known;
constexpr size_t STACK = 32 << 10;
constexpr int MAX_COPIES = 256;
struct Observer {
    int thread, block;
    uint32_t clock;    // counts what it has told others
    uint32_t fenced;   // up to when what it wrote may be copied, or overwritten by a copy: 0, nothing
    Known known;
    const char* stack;   // its own, of STACK bytes
};
enum Kind : uint8_t { READ, ATOMIC, WRITE };
struct Array {
    const void* at;
    size_t bytes;
    int block = -1;   // whose shared memory it is; -1: nobody's
};
// A copy goes on by itself: it is someone else, by its own clock.
struct Copy {
    int index;
    uint32_t clock;
    bool is_bulk;   // by the async proxy, which sees what threads have written and fenced
};

extern Observer* observer;   // whose accesses these are; null: nobody's
extern char found[200];      // the first race
// Where this library's thread_local variables lie.
Array variables();
// Where to look, in all blocks of a launch that begins here: those that run one after the other are not
// ordered either.
void watch(const std::vector<Array>& arrays);
// Some of its blocks begin, of so many threads in all, each with memory of its own. -> what they know:
// nothing.
Known begin(const std::vector<Array>& of_blocks, const std::vector<const Observer*>& threads);
int index_of_copy(int number);
void touch(const void* at, size_t bytes, Kind kind, const void* by, const Copy* copy = nullptr);

// What several have told each other, and who heard it.
class Told {
    std::vector<Known> all, at_home;
    std::vector<std::pair<int, uint32_t>> clocks;
    Known heard;
    std::map<const Clocks*, std::pair<Known, Known>> heard_by;

public:
    void add(Observer& its);   // everything
    // What it knows of blocks' own shared memory: that is one, and what a barrier has ordered there has
    // happened.
    void add_at_home(const Observer& its);
    void settle();   // everybody has come
    void tell(Observer& its);
};
// From now on it knows this of a copy.
void hear(Observer& its, int index, uint32_t clock);

// While it lives accesses are the emulator's own.
struct Aside {
    Observer* before;
    Aside();
    ~Aside();
};
}   // namespace races
