// What races.h says. Compiled without -fsanitize=thread.
#include "races.h"

#include <dlfcn.h>
#include <link.h>
#include <stdio.h>

#include <algorithm>

namespace races {
namespace {
struct Access {
    int index;
    uint32_t clock, run;
    uint8_t bytes;   // of the word's four
    Kind kind;
    const void* by;
};
struct Word {                            // what a new access could yet be in conflict with
    std::vector<Access> writes, reads;   // atomics are among the writes
};
struct Region {
    const char *begin, *end;
    int block;
    std::vector<Word> words;
};
std::vector<Region> of_launch, of_blocks;
std::vector<Region*> regions;   // all, in order
std::vector<const Observer*> threads;
uint32_t run;   // blocks that run at once
// Of each page of 4 KiB, by its last bits, whether something there may be watched: most accesses are the
// emulator's own.
constexpr int PAGES = 1 << 16;
uint64_t pages[PAGES / 64];

unsigned long place_of(const void* code) {   // for addr2line
    Dl_info library;
    return dladdr(code, &library) ? (const char*)code - (const char*)library.dli_fbase : 0;
}
int thread_of(int index) { return index % (int)threads.size(); }
bool is_thread(int index) { return index < 2 * (int)threads.size(); }
void report(const char* what, const Region& region, size_t word, const Access& one, const Access& other) {
    if (found[0]) return;
    const char* const names[] = {"a read", "an atomic", "a write"};
    const auto who = [](const Access& it) {
        return it.run != run ? -1 : is_thread(it.index) ? thread_of(it.index) : it.index;
    };
    snprintf(found, sizeof found,
             "%s of thread %d and %s of thread %d at byte %zu of %zu are not %s, 0x%lx and 0x%lx",
             names[one.kind], who(one), names[other.kind], who(other), word * 4,
             (size_t)(region.end - region.begin), what, place_of(one.by), place_of(other.by));
}
bool is_ordered(const Access& it) {
    const bool is_own = is_thread(it.index) && thread_of(it.index) == observer->thread;
    return it.run == run && (is_own || it.clock <= (*observer->known)[it.index]);
}
// Those that `mine` is not ordered after are races. Who comes after `mine` comes after the ordered ones, too:
// they may go.
void compare(const Region& region, size_t word, std::vector<Access>& before, const Access& mine,
             bool is_bulk) {
    size_t left = 0;
    for (const Access& other : before) {
        const bool overlaps = other.bytes & mine.bytes,
                   conflicts = mine.kind != other.kind || mine.kind == WRITE, comes_after = is_ordered(other);
        if (overlaps && conflicts && !comes_after) report("ordered", region, word, other, mine);
        const bool is_generic_write = other.kind != READ && is_thread(other.index);
        if (overlaps && is_bulk && is_generic_write && comes_after &&
            other.clock > threads[thread_of(other.index)]->fenced)
            report("fenced", region, word, other, mine);
        const bool is_covered = comes_after && (mine.kind == WRITE || mine.kind == other.kind) &&
                                (other.bytes & ~mine.bytes) == 0;
        if (!is_covered) before[left++] = other;
    }
    before.resize(left);
}
void touch_word(Region& region, size_t at, const Access& mine, bool is_bulk) {
    Word& word = region.words[at];
    std::vector<Access>& its = mine.kind == READ ? word.reads : word.writes;
    if (!its.empty() && !is_bulk) {   // once more the same
        const Access& last = its.back();
        if (last.index == mine.index && last.clock == mine.clock && last.run == mine.run &&
            last.kind == mine.kind && last.bytes == mine.bytes && (mine.kind == READ || word.reads.empty()))
            return;
    }
    compare(region, at, word.writes, mine, is_bulk);
    // Reads are no race for each other: covered ones go when there is no room for one more.
    if (mine.kind != READ || word.reads.size() == word.reads.capacity())
        compare(region, at, word.reads, mine, is_bulk);
    its.push_back(mine);
}
bool may_be_watched(const char* p) {
    const size_t page = ((uintptr_t)p >> 12) % PAGES;
    return pages[page / 64] >> page % 64 & 1;
}
std::vector<Region> regions_of(const std::vector<Array>& arrays) {
    std::vector<Region> out;
    for (const Array& it : arrays) {
        const uintptr_t begin = (uintptr_t)it.at & ~(uintptr_t)3,
                        end = ((uintptr_t)it.at + it.bytes + 3) & ~(uintptr_t)3;
        if (it.bytes) out.push_back({(const char*)begin, (const char*)end, it.block, {}});
    }
    std::sort(out.begin(), out.end(), [](const Region& a, const Region& b) { return a.begin < b.begin; });
    // Arrays may overlap: one place is in one region.
    size_t count = 0;
    for (const Region& it : out) {
        if (count && it.begin < out[count - 1].end) out[count - 1].end = std::max(out[count - 1].end, it.end);
        else out[count++] = it;
    }
    out.resize(count);
    for (Region& it : out) it.words.resize((it.end - it.begin) / 4);
    return out;
}
Known both(const Known& a, const Known& b) {
    auto out = std::make_shared<Clocks>(*a);
    for (size_t k = 0; k < out->size(); ++k) (*out)[k] = std::max((*out)[k], (*b)[k]);
    return out;
}
}   // namespace

Observer* observer;
char found[200];

Array variables() {
    static thread_local volatile char one;
    one = 0;   // they are made when one is asked for
    Array all = {};
    const auto visit = [](dl_phdr_info* library, size_t, void* all) {
        for (int i = 0; i < library->dlpi_phnum; ++i) {
            const char* begin = (const char*)library->dlpi_tls_data;
            const size_t bytes = library->dlpi_phdr[i].p_memsz;
            const bool is_ours = library->dlpi_phdr[i].p_type == PT_TLS && begin && (char*)&one >= begin &&
                                 (char*)&one < begin + bytes;
            if (is_ours) *(Array*)all = {begin, bytes};
        }
        return 0;
    };
    dl_iterate_phdr(visit, &all);
    return all;
}

void watch(const std::vector<Array>& arrays) { of_launch = regions_of(arrays); }
Known begin(const std::vector<Array>& arrays, const std::vector<const Observer*>& all_threads) {
    found[0] = 0;
    ++run;
    threads = all_threads;
    of_blocks = regions_of(arrays);
    regions.clear();
    std::fill(pages, pages + PAGES / 64, 0);
    for (auto* all : {&of_launch, &of_blocks})
        for (Region& it : *all) {
            regions.push_back(&it);
            for (uintptr_t page = (uintptr_t)it.begin >> 12; page <= (uintptr_t)it.end >> 12; ++page)
                pages[page % PAGES / 64] |= uint64_t(1) << page % 64;
        }
    std::sort(regions.begin(), regions.end(),
              [](const Region* a, const Region* b) { return a->begin < b->begin; });
    return std::make_shared<Clocks>(2 * threads.size() + MAX_COPIES);
}
int index_of_copy(int number) { return 2 * (int)threads.size() + number % MAX_COPIES; }

void touch(const void* at, size_t bytes, Kind kind, const void* by, const Copy* copy) {
    const char* p = (const char*)at;
    if (!observer || (size_t)(p - observer->stack) < STACK || regions.empty() || p < regions.front()->begin)
        return;
    Region* region = *(std::upper_bound(regions.begin(), regions.end(), p,
                                        [](const char* p, const Region* it) { return p < it->begin; }) -
                       1);
    if (p >= region->end) return;
    size_t from = p - region->begin;
    const size_t to = std::min(from + bytes, (size_t)(region->end - region->begin));
    const int own = observer->thread + (region->block == observer->block ? (int)threads.size() : 0);
    for (; from < to; from = from / 4 * 4 + 4) {
        const size_t last = std::min(to - from / 4 * 4, (size_t)4);
        const uint8_t mask = (uint8_t)((1 << last) - (1 << from % 4));
        touch_word(*region, from / 4,
                   {copy ? copy->index : own, copy ? copy->clock : observer->clock, run, mask, kind, by},
                   copy && copy->is_bulk);
    }
}

void Told::add(Observer& its) {
    if (all.empty() || all.back() != its.known) all.push_back(its.known);
    clocks.push_back({its.thread, its.clock});
    clocks.push_back({its.thread + (int)threads.size(), its.clock++});
}
void Told::add_at_home(const Observer& its) {
    if (at_home.empty() || at_home.back() != its.known) at_home.push_back(its.known);
}
void Told::settle() {
    const auto alike = [](std::vector<Known>& of) {
        std::sort(of.begin(), of.end());
        of.erase(std::unique(of.begin(), of.end()), of.end());
    };
    alike(all);
    alike(at_home);
    std::shared_ptr<Clocks> out;
    if (!all.empty()) out = std::make_shared<Clocks>(*all[0]);
    else if (!at_home.empty()) out = std::make_shared<Clocks>(at_home[0]->size());
    for (size_t i = 1; i < all.size(); ++i)
        for (size_t k = 0; k < out->size(); ++k) (*out)[k] = std::max((*out)[k], (*all[i])[k]);
    for (const Known& it : at_home)
        for (size_t k = threads.size(); k < 2 * threads.size(); ++k)
            (*out)[k] = std::max((*out)[k], (*it)[k]);
    for (const auto& [index, clock] : clocks) (*out)[index] = std::max((*out)[index], clock);
    *this = {};
    heard = out;
}
void Told::tell(Observer& its) {
    if (!heard || its.known == heard) return;
    auto& [before, after] = heard_by[its.known.get()];   // threads that knew the same know the same
    if (!before) {
        before = its.known;
        after = both(before, heard);
    }
    its.known = after;
}
void hear(Observer& its, int index, uint32_t clock) {
    if ((*its.known)[index] >= clock) return;
    auto more = std::make_shared<Clocks>(*its.known);
    (*more)[index] = clock;
    its.known = more;
}
// Calls, since g++ adds the hooks last: it would find nothing between two assignments.
Aside::Aside() : before(observer) { observer = nullptr; }
Aside::~Aside() { observer = before; }
}   // namespace races

extern "C" {
// clang-format off: macros that make functions
#define HOOK(name, bytes, kind) \
    void __tsan_##name(const void* p) { \
        if (races::may_be_watched((const char*)p)) \
            races::touch(p, bytes, races::kind, __builtin_return_address(0)); \
    }
#define HOOKS(bytes) \
    HOOK(read##bytes, bytes, READ) HOOK(write##bytes, bytes, WRITE) \
    HOOK(unaligned_read##bytes, bytes, READ) HOOK(unaligned_write##bytes, bytes, WRITE)
HOOKS(1) HOOKS(2) HOOKS(4) HOOKS(8) HOOKS(16);
// clang-format on
void __tsan_read_range(const void* p, size_t bytes) {
    races::touch(p, bytes, races::READ, __builtin_return_address(0));
}
void __tsan_write_range(const void* p, size_t bytes) {
    races::touch(p, bytes, races::WRITE, __builtin_return_address(0));
}
void __tsan_init() {}
void __tsan_vptr_update(void**, void*) {}
// Of the standard library, in the emulator.
int __tsan_atomic32_fetch_add(int* p, int v, int) { return __atomic_fetch_add(p, v, __ATOMIC_SEQ_CST); }
char __tsan_atomic8_load(const char* p, int) { return __atomic_load_n(p, __ATOMIC_SEQ_CST); }
}
