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
    uint32_t clock;
    uint8_t bytes;   // of the word's four
    Kind kind;
    const void* by;
};
struct Region {
    const char *begin, *end;
    std::vector<std::vector<Access>> words;   // of each, what a new access could yet be in conflict with
    std::vector<int> hidden;                  // the thread that wrote it, from 1 on, and has not shown it yet
};
std::vector<Region> regions;   // in order
std::vector<std::vector<int*>> unshown;   // by thread

unsigned long place_of(const void* code) {   // for addr2line
    Dl_info library;
    return dladdr(code, &library) ? (const char*)code - (const char*)library.dli_fbase : 0;
}

void touch_word(Region& region, size_t word, const Access& mine) {
    const Clocks& known = *observer->known;
    std::vector<Access>& before = region.words[word];
    size_t kept = 0;
    for (const Access& other : before) {
        const bool is_ordered = other.index == observer->index || other.clock <= known[other.index];
        const bool conflicts = mine.kind != other.kind || mine.kind == WRITE;
        if (!is_ordered && conflicts && other.bytes & mine.bytes && !found[0]) {
            const char* const names[] = {"a read", "an atomic", "a write"};
            snprintf(found, sizeof found, "%s of thread %d and %s of thread %d at byte %zu of array %zu are not ordered, 0x%lx and 0x%lx", names[other.kind],
                     other.index, names[mine.kind], mine.index, word * 4, &region - regions.data(), place_of(other.by), place_of(mine.by));
        }
        // Who comes after this access comes after an earlier one, too.
        const bool is_covered = is_ordered && (mine.kind == WRITE || mine.kind == other.kind) && (other.bytes & ~mine.bytes) == 0;
        if (!is_covered) before[kept++] = other;
    }
    before.resize(kept);
    before.push_back(mine);
    if (!looks_for_hidden || mine.kind != WRITE) return;
    const bool is_copy = mine.index != observer->index;
    region.hidden[word] = is_copy ? 0 : mine.index + 1;
    if (is_copy) return;
    if ((int)unshown.size() <= mine.index) unshown.resize(mine.index + 1);
    unshown[mine.index].push_back(&region.hidden[word]);
}
Region* region_of(const char* p) {
    if (regions.empty() || p < regions.front().begin || p >= regions.back().end) return nullptr;
    const auto region = std::upper_bound(regions.begin(), regions.end(), p, [](const char* p, const Region& it) { return p < it.begin; }) - 1;
    return p < region->end ? &*region : nullptr;
}
}  // namespace

Observer* observer;
char found[200];
bool looks_for_hidden;

std::pair<const void*, size_t> variables() {
    static thread_local volatile char one;
    one = 0;   // they are made when one is asked for
    std::pair<const void*, size_t> all;
    const auto visit = [](dl_phdr_info* library, size_t, void* all) {
        for (int i = 0; i < library->dlpi_phnum; ++i) {
            const char* begin = (const char*)library->dlpi_tls_data;
            const size_t bytes = library->dlpi_phdr[i].p_memsz;
            const bool is_ours = library->dlpi_phdr[i].p_type == PT_TLS && begin && (char*)&one >= begin && (char*)&one < begin + bytes;
            if (is_ours) *(std::pair<const void*, size_t>*)all = {begin, bytes};
        }
        return 0;
    };
    dl_iterate_phdr(visit, &all);
    return all;
}

void watch(const std::vector<std::pair<const void*, size_t>>& arrays) {
    found[0] = 0;
    regions.clear();
    unshown.clear();
    for (const auto& [at, bytes] : arrays) {
        const char* begin = (const char*)((uintptr_t)at & ~(uintptr_t)3);
        const size_t words = ((const char*)at + bytes - begin + 3) / 4;
        regions.push_back({begin, begin + words * 4, std::vector<std::vector<Access>>(words), std::vector<int>(words)});
    }
    std::sort(regions.begin(), regions.end(), [](const Region& a, const Region& b) { return std::pair(a.begin, a.end) < std::pair(b.begin, b.end); });
}

void touch(const void* at, size_t bytes, Kind kind, const void* by, int as, uint32_t when) {
    if (!observer) return;
    const char *p = (const char*)at, *stack = observer->stack;
    if (p >= stack && p < stack + STACK) return;
    Region* region = region_of(p);
    if (!region) return;
    size_t from = p - region->begin;
    const size_t to = std::min(from + bytes, (size_t)(region->end - region->begin));
    for (; from < to; from = from / 4 * 4 + 4) {
        const size_t last = std::min(to - from / 4 * 4, (size_t)4);
        touch_word(*region, from / 4, {as, when, (uint8_t)((1 << last) - (1 << from % 4)), kind, by});
    }
}
void touch(const void* at, size_t bytes, Kind kind) {
    if (observer) touch(at, bytes, kind, __builtin_return_address(0), observer->index, observer->clock);
}

void show(const Observer& its) {
    if ((int)unshown.size() <= its.index) return;
    for (int* hidden : unshown[its.index])
        if (*hidden == its.index + 1) *hidden = 0;
    unshown[its.index].clear();
}
bool is_hidden(const void* at, size_t bytes) {
    const Region* region = region_of((const char*)at);
    if (!region) return false;
    const size_t from = (const char*)at - region->begin;
    for (size_t word = from / 4; word * 4 < from + bytes && word < region->hidden.size(); ++word)
        if (region->hidden[word]) return true;
    return false;
}

void Told::add(Observer& its, bool all) {
    if (of.empty() || of.back() != its.known) of.push_back(its.known);
    if (all) clocks.push_back({its.index, its.clock++});
}
Known Told::all() const {
    if (of.empty()) return nullptr;
    auto out = std::make_shared<Clocks>(*of[0]);
    for (const Known& other : of)
        for (size_t k = 0; other != of[0] && k < out->size(); ++k) (*out)[k] = std::max((*out)[k], (*other)[k]);
    for (const auto& [index, clock] : clocks) (*out)[index] = std::max((*out)[index], clock);
    return out;
}
void hear(Observer& its, int index, uint32_t clock) {
    if ((*its.known)[index] >= clock) return;
    auto both = std::make_shared<Clocks>(*its.known);
    (*both)[index] = clock;
    its.known = both;
}
void hear(Observer& its, const Known& all) {
    Told both;
    both.of = {its.known, all};
    its.known = both.all();
}
// Calls, since g++ adds the hooks last: it would find nothing between two assignments.
Aside::Aside() : before(observer) { observer = nullptr; }
Aside::~Aside() { observer = before; }
}  // namespace races

extern "C" {
#define HOOK(name, bytes, kind) \
    void __tsan_##name(const void* p) { \
        if (races::observer) races::touch(p, bytes, races::kind, __builtin_return_address(0), races::observer->index, races::observer->clock); \
    }
#define HOOKS(bytes) \
    HOOK(read##bytes, bytes, READ) HOOK(write##bytes, bytes, WRITE) HOOK(unaligned_read##bytes, bytes, READ) HOOK(unaligned_write##bytes, bytes, WRITE)
HOOKS(1) HOOKS(2) HOOKS(4) HOOKS(8) HOOKS(16)
void __tsan_read_range(const void* p, size_t bytes) { races::touch(p, bytes, races::READ); }
void __tsan_write_range(const void* p, size_t bytes) { races::touch(p, bytes, races::WRITE); }
void __tsan_init() {}
void __tsan_vptr_update(void**, void*) {}
// Of the standard library, in the emulator.
int __tsan_atomic32_fetch_add(int* p, int v, int) { return __atomic_fetch_add(p, v, __ATOMIC_SEQ_CST); }
char __tsan_atomic8_load(const char* p, int) { return __atomic_load_n(p, __ATOMIC_SEQ_CST); }
}
