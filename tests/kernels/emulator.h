// Runs a kernel's own source on one CPU thread: every thread of a cluster of blocks is a coroutine that
// changes hands at barriers and warp operations, in a shuffled order, some warps far behind others. A barrier
// that not all threads reach, or a warp operation that not all lanes call alike, ends in a message, and so
// does a race (races.h). For kernels that take all shared memory from shared_memory(), or a block at a time.
#pragma once
#include <setjmp.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <ucontext.h>

#include <algorithm>
#include <functional>
#include <map>
#include <random>
#include <vector>

#include "races.h"

inline uint32_t __float_as_uint(float v) {
    uint32_t bits;
    memcpy(&bits, &v, 4);
    return bits;
}
inline float __uint_as_float(uint32_t bits) {
    float v;
    memcpy(&v, &bits, 4);
    return v;
}
template <typename T> T __ldg(const T* p) { return *p; }

#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
// Of the one block that runs; races.cpp finds what is thread_local.
#define __shared__ static thread_local
#define threadIdx (emulator::Index{emulator::now->index})
#define blockIdx (emulator::Index{emulator::first_block + emulator::now->block})

using std::max;
using std::min;

namespace emulator {
struct Index {
    int x;
};
struct Barrier {
    int arrived = 0, expected = 0;
    uint64_t turn = 0;
    std::shared_ptr<races::Told>
        told;   // those of this turn: others may meet here before all of the last one have gone on
};
struct Ticket {   // of one that has arrived
    uint64_t turn = 0;
    std::shared_ptr<races::Told> told;
};
struct Warp {
    Barrier barrier;
    uint64_t value[32], settled[32];
    const char* call[32];
};
constexpr int NAMED = 16;
struct Block {
    std::vector<char> memory;
    Barrier barriers[NAMED];   // 0: of all threads
    int votes = 0;
    std::vector<Warp> warps;
    bool has_left = false;   // a thread of it
};
struct Thread {
    int block, index;
    std::vector<char> stack;
    ucontext_t context;
    jmp_buf at;
    bool is_started = false, is_done = false, spins = false;
    bool has_waited = false, has_triggered = false, triggers_late = false;   // PDL
    int waits = 0;
    const Barrier* waits_for = nullptr;   // until its turn is no longer this one
    uint64_t turn = 0;
    Ticket at_cluster;
    bool has_arrived = false;   // at the cluster's barrier, for which it has not waited yet
    races::Observer observer;
};

inline std::vector<Block> blocks;
inline std::vector<Thread> threads;
inline Barrier cluster;
inline uint64_t epochs;   // barriers of blocks and of the cluster that have opened
inline Thread* now;
inline jmp_buf scheduler;
inline int first_block, threads_per_block;
inline const std::function<void()>* kernel;
inline char problem[200];
// Of a launch that may start early: called when no thread can go on but by what the launches before it wrote.
inline std::function<void()> complete_prerequisites;
inline Barrier prerequisites;
// Memory that earlier launches are still writing: noise until the wait. Nobody writes it before. All threads
// of a block wait, once, or none does, or some never do.
struct Pending {
    char* at;
    size_t bytes;
    std::vector<char> there;
};
inline std::vector<Pending> pending;
inline bool all_wait = true;   // else some threads need nothing of earlier launches
constexpr char NOISE = (char)0xFF;

// Where copies tell that they are complete: which thread they are (races.h), and how often that was.
struct Mailbox {
    int index;
    uint32_t clock = 0;
};
inline std::map<const void*, Mailbox> mailboxes;
// Races are looked for in shared memory, in variables of a block, and in what races::watch was told.
inline std::vector<races::Array> variables;

// What is sent from shared memory is read when it arrives, some time later: who overwrites it, or leaves, is
// found out.
struct Sent {
    char *to, *from;
    uint64_t* there;   // the inbox
    int bytes, sender;
};
inline std::vector<Sent> on_their_way;

inline void fail(const char* what, const char* detail = "") {
    if (!problem[0])
        snprintf(problem, sizeof problem, "%s%s (block %d, thread %d)", what, detail, now->block, now->index);
}
inline void pause_for(const Barrier& barrier, uint64_t turn) {
    if (barrier.turn != turn) return;
    now->waits_for = &barrier;
    now->turn = turn;
    if (!_setjmp(now->at)) _longjmp(scheduler, 1);
}
// Lets others go on. One that `spins` waits for what they write: if all do that, nobody ever goes on.
inline void yield(bool spins) {
    now->spins = spins;
    if (!_setjmp(now->at)) _longjmp(scheduler, 1);
}
// What others know after a barrier of what a thread did before it.
enum Tells {
    NOTHING,
    AT_HOME,
    ALL
};   // AT_HOME: what earlier barriers had ordered in blocks' own shared memory
inline Ticket arrive(Barrier& barrier, int expected, Tells tells = ALL) {
    if (barrier.arrived && barrier.expected != expected)
        fail("threads meet at one barrier, but disagree how many they are");
    barrier.expected = expected;
    if (tells && !barrier.told) barrier.told = std::make_shared<races::Told>();
    if (tells == ALL) barrier.told->add(now->observer);
    if (tells == AT_HOME) barrier.told->add_at_home(now->observer);
    const Ticket ticket = {barrier.turn, barrier.told};
    if (++barrier.arrived == expected) {
        barrier.arrived = 0;
        if (tells) barrier.told->settle();
        barrier.told = nullptr;
        ++barrier.turn;
        epochs += expected > 32;
    }
    return ticket;
}
inline void leave(const Barrier& barrier, const Ticket& ticket) {
    pause_for(barrier, ticket.turn);
    if (ticket.told) ticket.told->tell(now->observer);
}
inline void meet(Barrier& barrier, int expected, Tells tells = ALL) {
    leave(barrier, arrive(barrier, expected, tells));
}
inline Warp& my_warp() { return blocks[now->block].warps[now->index / 32]; }

// After all lanes have called this; the last of them runs `settle` on the values of all.
template <typename T, typename F> void together(const char* call, T mine, F settle, Tells tells = NOTHING) {
    static_assert(sizeof(T) <= sizeof(uint64_t));
    Warp& warp = my_warp();
    memcpy(&warp.value[now->index % 32], &mine, sizeof mine);
    warp.call[now->index % 32] = call;
    const Ticket ticket = arrive(warp.barrier, 32, tells);
    if (warp.barrier.turn != ticket.turn) {
        for (const char* other : warp.call)
            if (strcmp(other, call)) fail("lanes of a warp call different things, among them ", call);
        memcpy(warp.settled, warp.value, sizeof warp.value);
        if (!problem[0]) settle(warp.settled);
    }
    leave(warp.barrier, ticket);
}
// All lanes' values.
template <typename T> void together(const char* call, T mine, T (&all)[32]) {
    together(call, mine, [](const uint64_t*) {});
    for (int i = 0; i < 32; ++i) memcpy(&all[i], &my_warp().settled[i], sizeof(T));
    meet(my_warp().barrier, 32, NOTHING);
}

inline Mailbox& mailbox(const void* at) {
    if (mailboxes.size() == races::MAX_COPIES && !mailboxes.count(at)) fail("too many mailboxes");
    return mailboxes.insert({at, {races::index_of_copy((int)mailboxes.size())}}).first->second;
}
// A copy that this thread starts, and that whoever has awaited the mailbox knows of.
inline void post(const void* at, const void* to, const void* from, size_t bytes) {
    const Mailbox& box = mailbox(at);
    const races::Copy copy = {box.index, box.clock + 1, from != nullptr};
    const void* by = __builtin_return_address(0);
    if (from) races::touch(from, bytes, races::READ, by, &copy);
    races::touch(to, bytes, races::WRITE, by, &copy);
}
inline void collect(const void* at) { races::hear(now->observer, mailbox(at).index, mailbox(at).clock); }

inline void begin() {
    (*kernel)();
    for (const Sent& sent : on_their_way)
        if (sent.sender == now->block) fail("a block leaves while what it sent is on its way");
    now->is_done = blocks[now->block].has_left = true;
    _longjmp(scheduler, 1);
}

// One cluster of `count` blocks; an empty string, or what went wrong.
inline const char* run(int first, int count, int per_block, size_t shared_bytes, unsigned seed,
                       const std::function<void()>& body) {
    first_block = first;
    threads_per_block = per_block;
    kernel = &body;
    problem[0] = 0;
    cluster = prerequisites = {};
    for (Pending& it : pending) {
        it.there.assign(it.at, it.at + it.bytes);
        memset(it.at, NOISE, it.bytes);
    }
    on_their_way.clear();
    blocks.assign(count, Block{});
    for (Block& block : blocks) {
        block.memory.assign(shared_bytes, (char)0xA5);
        block.warps.resize(per_block / 32);
    }
    threads.resize(count * per_block);
    mailboxes.clear();
    std::vector<races::Array> own = variables;
    own.push_back(races::variables());
    for (int i = 0; i < count; ++i) own.push_back({blocks[i].memory.data(), shared_bytes, i});
    std::vector<const races::Observer*> observers;
    for (const Thread& thread : threads) observers.push_back(&thread.observer);
    const races::Known nothing = races::begin(own, observers);
    std::vector<int> order;
    for (int i = 0; i < count * per_block; ++i) {
        Thread& thread = threads[i];
        thread.block = i / per_block;
        thread.index = i % per_block;
        thread.stack.resize(races::STACK);
        thread.is_started = thread.is_done = thread.spins = false;
        thread.has_waited = thread.has_triggered = thread.triggers_late = thread.has_arrived = false;
        thread.waits = 0;
        thread.waits_for = nullptr;
        thread.observer = {i, thread.block, 1, 0, nothing, thread.stack.data()};
        order.push_back(i);
    }
    // Static, as everything that must survive a jump. Warps in `is_slow` stand still until nothing else can
    // go on; others are chosen when a barrier of the cluster opens, or with odd seeds any, so that some have
    // not yet read what is overtaken by the next writes.
    static std::mt19937 random;
    random.seed(seed);
    static std::vector<char> is_slow;
    is_slow.assign(threads.size() / 32, 0);
    static size_t i, progress, held_back;
    static uint64_t seen;
    static const uint64_t* event;
    event = seed % 2 ? &epochs : &cluster.turn;
    seen = ~uint64_t(0);
    do {
        std::shuffle(order.begin(), order.end(), random);
        progress = held_back = 0;
        for (i = 0; i < order.size(); ++i) {
            if (seen != *event)
                for (char& slow : is_slow) slow = random() % 3 == 0;
            seen = *event;
            now = &threads[order[i]];
            if (now->is_done || (now->waits_for && now->waits_for->turn == now->turn)) continue;
            if (is_slow[order[i] / 32]) {
                ++held_back;
                continue;
            }
            now->waits_for = nullptr;
            now->spins = false;
            ++progress;
            if (_setjmp(scheduler)) {
                races::observer = nullptr;
                if (races::found[0]) fail(races::found);
                progress -= now->spins;
                continue;
            }
            races::observer = &now->observer;
            if (now->is_started) _longjmp(now->at, 1);
            now->is_started = true;
            getcontext(&now->context);
            now->context.uc_stack.ss_sp = now->stack.data();
            now->context.uc_stack.ss_size = now->stack.size();
            makecontext(&now->context, begin, 0);
            setcontext(&now->context);
        }
        if (!progress && held_back) {
            is_slow.assign(is_slow.size(), 0);
            progress = 1;
        }
        if (!progress && prerequisites.arrived && !prerequisites.turn) {
            complete_prerequisites();
            prerequisites.turn = progress = 1;
        }
    } while (progress && !problem[0]);
    for (const Thread& thread : threads)
        if (!thread.is_done) {
            now = const_cast<Thread*>(&thread);
            fail("threads wait for ones that never come");
        }
    // A launch must not end before those ahead of it: its first block waits. Others that have nothing to do
    // may leave.
    const bool has_left_early = prerequisites.arrived == 0 && first > 0;
    if (!pending.empty() && has_left_early) complete_prerequisites();
    else if (!pending.empty() && std::any_of(threads.begin(), threads.end(), [](const Thread& it) {
                 return it.waits > 1 || it.waits < all_wait;
             }))
        fail("not every thread waited, once, for what earlier launches write");
    return problem;
}
// So many bytes that the next launch finds unfinished, and in which races are looked for; 0 ends it.
extern "C" inline __attribute__((used)) void expect(void* at, size_t bytes) {
    if (bytes) pending.push_back({(char*)at, bytes, {}});
    else pending.clear();   // and what lay there may be freed, and be the emulator's own
    std::vector<races::Array> watched;
    for (const Pending& it : pending) watched.push_back({it.at, it.bytes});
    races::watch(watched);
    complete_prerequisites = nullptr;
    if (bytes)
        complete_prerequisites = [] {
            for (const Pending& it : pending) {
                if (std::any_of(it.at, it.at + it.bytes, [](char c) { return c != NOISE; }))
                    fail("written before the wait");
                memcpy(it.at, it.there.data(), it.bytes);
            }
        };
}
}   // namespace emulator

inline void* shared_memory() { return emulator::blocks[emulator::now->block].memory.data(); }
template <typename T> T* in_block(T* p, int block) {
    using namespace emulator;
    const ptrdiff_t offset = (char*)p - blocks[now->block].memory.data();
    if (offset < 0 || offset >= (ptrdiff_t)blocks[block].memory.size())
        fail("an address outside shared memory");
    if (cluster.turn == 0) fail("another block's memory is touched before that block is known to run");
    if (blocks[block].has_left) fail("another block's memory is touched when that block has left");
    return (T*)(blocks[block].memory.data() + offset);
}
inline void all_arrive(emulator::Tells tells = emulator::ALL) {
    if (emulator::now->has_arrived)
        emulator::fail("the cluster's barrier is arrived at twice before the wait");
    emulator::now->has_arrived = true;
    emulator::now->at_cluster = emulator::arrive(emulator::cluster, (int)emulator::threads.size(), tells);
    emulator::yield(false);   // what follows may come after all others' next steps
}
inline void all_started() { all_arrive(emulator::AT_HOME); }   // releases nothing
inline void all_wait() {
    if (!emulator::now->has_arrived)
        emulator::fail("the cluster's barrier is waited for by one that did not arrive");
    emulator::now->has_arrived = false;
    emulator::leave(emulator::cluster, emulator::now->at_cluster);
}
// An inbox counts the bytes that are missing.
typedef uint64_t Inbox;
inline void open_inbox(Inbox* inbox, int bytes) {
    const races::Aside aside;
    *inbox = bytes;
}
template <typename T> void send(const void* to, T v, int block, const Inbox* inbox) {
    Inbox* there = in_block((Inbox*)inbox, block);
    emulator::post(there, in_block((T*)to, block), nullptr, sizeof(T));
    {
        const races::Aside aside;
        if (*there < sizeof(T) || *there > 1 << 20) emulator::fail("more is sent than the inbox expects");
        *in_block((T*)to, block) = v;
        *there -= sizeof(T);
    }
    emulator::yield(false);
}
inline void send_from(const void* to, const void* from, int bytes, int block, const Inbox* inbox) {
    Inbox* there = in_block((Inbox*)inbox, block);
    in_block((char*)to + bytes - 1, block);
    emulator::post(there, in_block((char*)to, block), from, bytes);
    emulator::on_their_way.push_back(
        {in_block((char*)to, block), (char*)from, there, bytes, emulator::now->block});
    emulator::yield(false);
}
inline void deliver_one() {
    using namespace emulator;
    static std::minstd_rand random;
    if (on_their_way.empty() || random() % 512) return;   // late, so that who does not wait for it goes first
    std::swap(on_their_way[random() % on_their_way.size()], on_their_way.back());
    const races::Aside aside;
    const Sent sent = on_their_way.back();
    on_their_way.pop_back();
    if (blocks[sent.sender].has_left) fail("a block has left what it sent from its memory");
    if (*sent.there < (uint64_t)sent.bytes || *sent.there > 1 << 20)
        fail("more is sent than the inbox expects");
    memcpy(sent.to, sent.from, sent.bytes);
    *sent.there -= sent.bytes;
}
inline bool is_full(const Inbox* inbox) {
    const races::Aside aside;
    return *inbox == 0;
}
inline void await_inbox(const Inbox* inbox) {
    while (!is_full(inbox)) {
        deliver_one();
        if (!is_full(inbox)) emulator::yield(emulator::on_their_way.empty());
    }
    emulator::mailbox(inbox).clock = 1;   // used once
    emulator::collect(inbox);
}
inline void copies_may_follow() { emulator::now->observer.fenced = emulator::now->observer.clock++; }
inline void launch_dependents() {
    if (!emulator::now->has_triggered) emulator::now->triggers_late = emulator::now->has_waited;
    emulator::now->has_triggered = true;
}
inline void wait_for_prerequisites() {
    emulator::now->has_waited = true;
    if (!emulator::complete_prerequisites) return;
    ++emulator::now->waits;
    ++emulator::prerequisites.arrived;
    emulator::pause_for(emulator::prerequisites, 0);
}
inline void group_barrier(int number, int threads) {
    if (number < 0 || number >= emulator::NAMED || threads % 32) return emulator::fail("no such barrier");
    emulator::meet(emulator::blocks[emulator::now->block].barriers[number], threads);
}
inline void __syncthreads() { group_barrier(0, emulator::threads_per_block); }
inline int __syncthreads_count(bool v) {
    emulator::Block& block = emulator::blocks[emulator::now->block];
    if (block.barriers[0].arrived == 0) block.votes = 0;
    block.votes += v;
    __syncthreads();
    const int votes = block.votes;
    __syncthreads();
    return votes;
}
inline void __syncwarp() {
    emulator::together("syncwarp", 0, [](const uint64_t*) {}, emulator::ALL);
}

#include "warp_emulator.h"
