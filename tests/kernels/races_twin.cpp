// Small kernels, with and without races, for the emulator itself (test_races.py).
#include "fragments_twin.h"

#include <string>

namespace {
struct Case {
    int blocks, threads;
    bool is_cluster;   // else block after block
    std::function<void()> kernel;
};
int global[256], sources[256];
constexpr int INBOX = 512;   // where it lies in shared memory, in words

int thread() { return threadIdx.x; }
int block() { return blockIdx.x; }
int* words() { return (int*)shared_memory(); }
char* bytes() { return (char*)shared_memory(); }
Inbox* inbox() { return (Inbox*)(words() + INBOX); }
int result;
// A load that the compiler keeps.
__attribute__((noinline)) void look(int v) { result += v; }
void open_for(int sent) {
    if (thread() == 0) open_inbox(inbox(), sent);
    __syncwarp();
    all_started();
    all_wait();
}
template <typename F> Case block_of(int threads, F kernel) { return {1, threads, false, kernel}; }
template <typename F> Case cluster_of(F kernel) { return {2, 32, true, kernel}; }

const std::map<std::string, Case> CASES = {
    // A barrier of the block.
    {"barrier", block_of(64,
                         [] {
                             words()[thread()] = 1;
                             __syncthreads();
                             look(words()[63 - thread()]);
                         })},
    {"no barrier", block_of(64,
                            [] {
                                words()[thread()] = 1;
                                look(words()[63 - thread()]);
                            })},
    {"no barrier before the next write", block_of(64,
                                                  [] {
                                                      words()[thread()] = 1;
                                                      __syncthreads();
                                                      look(words()[63 - thread()]);
                                                      words()[thread()] = 2;
                                                  })},
    {"one writes for all", block_of(64,
                                    [] {
                                        if (thread() == 0) words()[0] = 1;
                                        __syncthreads();
                                        look(words()[0]);
                                    })},
    // A warp.
    {"syncwarp", block_of(32,
                          [] {
                              words()[thread()] = 1;
                              __syncwarp();
                              look(words()[31 - thread()]);
                          })},
    {"a shuffle is no barrier", block_of(32,
                                         [] {
                                             words()[thread()] = 1;
                                             look(__shfl_sync(~0u, 1, 0));
                                             look(words()[31 - thread()]);
                                         })},
    {"syncwarp of other warps", block_of(64,
                                         [] {
                                             words()[thread()] = 1;
                                             __syncwarp();
                                             look(words()[63 - thread()]);
                                         })},
    // Barriers of some warps.
    {"groups by themselves", block_of(128,
                                      [] {
                                          words()[thread()] = 1;
                                          group_barrier(1 + thread() / 64, 64);
                                          look(words()[thread() ^ 63]);
                                      })},
    {"groups that mix", block_of(128,
                                 [] {
                                     words()[thread()] = 1;
                                     group_barrier(1 + thread() / 64, 64);
                                     look(words()[thread() ^ 127]);
                                 })},
    {"known by way of another", block_of(96,
                                         [] {
                                             if (thread() == 0) words()[0] = 1;
                                             if (thread() < 64) group_barrier(1, 64);
                                             if (thread() >= 32) group_barrier(2, 64);
                                             if (thread() == 64) look(words()[0]);
                                         })},
    // One warp is still to leave a barrier where two others meet again.
    {"a barrier that others use next", block_of(96,
                                                [] {
                                                    words()[thread()] = 1;
                                                    group_barrier(0, 96);
                                                    if (thread() < 64) group_barrier(0, 64);
                                                    look(words()[95 - thread()]);
                                                })},
    {"a barrier that others use next says nothing of them", block_of(96,
                                                                     [] {
                                                                         group_barrier(0, 96);
                                                                         if (thread() < 64) {
                                                                             words()[thread()] = 1;
                                                                             group_barrier(0, 64);
                                                                         } else look(words()[thread() - 64]);
                                                                     })},
    // All but one of many readers are known.
    {"a forgotten reader", block_of(128,
                                    [] {
                                        look(words()[0]);
                                        if (thread() < 96) group_barrier(1, 96);
                                        if (thread() == 0) words()[0] = 1;
                                    })},
    // Bytes of a word.
    {"bytes side by side", block_of(64, [] { bytes()[thread()] = 1; })},
    {"a byte of a word", block_of(64,
                                  [] {
                                      if (thread() == 0) words()[0] = 1;
                                      if (thread() == 32) bytes()[3] = 1;
                                  })},
    {"a byte written again covers no word", block_of(64,
                                                     [] {
                                                         if (thread() == 0) words()[0] = 1;
                                                         __syncwarp();
                                                         if (thread() == 0) bytes()[0] = 1;
                                                         __syncwarp();
                                                         if (thread() == 32) look(bytes()[3]);
                                                     })},
    // Atomics.
    {"atomics", block_of(64,
                         [] {
                             atomicAdd(words(), 1);
                             __syncthreads();
                             look(words()[0]);
                         })},
    {"an atomic and a read", block_of(64,
                                      [] {
                                          if (thread()) atomicAdd(words(), 1);
                                          else look(words()[0]);
                                      })},
    // Copies that a thread awaits for itself alone.
    {"cp.async", block_of(64,
                          [] {
                              copy16(words() + 4 * thread(), sources + thread() % 32 * 4, true);
                              await_copies();
                              __syncthreads();
                              look(words()[4 * (63 - thread())]);
                          })},
    {"cp.async awaited after the barrier", block_of(64,
                                                    [] {
                                                        copy16(words() + 4 * thread(),
                                                               sources + thread() % 32 * 4, true);
                                                        __syncthreads();
                                                        await_copies();
                                                        look(words()[4 * (63 - thread())]);
                                                    })},
    // Clusters.
    {"release", cluster_of([] {
         open_for(0);
         in_block(words(), 1 - block())[thread()] = 1;
         __syncwarp();
         all_arrive();
         all_wait();
         look(words()[31 - thread()]);
         __syncwarp();
         all_started();
         all_wait();
     })},
    {"a relaxed barrier releases no store to another block", cluster_of([] {
         open_for(0);
         in_block(words(), 1 - block())[thread()] = 1;
         __syncwarp();
         all_started();
         all_wait();
         look(words()[31 - thread()]);
     })},
    {"nor one to global memory", cluster_of([] {
         if (block() == 0) global[thread()] = 1;
         __syncwarp();
         all_started();
         all_wait();
         if (block() == 1) look(global[thread()]);
     })},
    {"what a relaxed barrier follows in a block's own memory has happened", cluster_of([] {
         words()[thread()] = 1;
         __syncwarp();
         all_started();
         all_wait();
         in_block(words(), 1 - block())[thread()] = 2;
         __syncwarp();
         all_arrive();
         all_wait();
     })},
    {"without a barrier it has not", cluster_of([] {
         words()[thread()] = 1;
         all_started();
         all_wait();
         in_block(words(), 1 - block())[thread()] = 2;
         __syncwarp();
         all_arrive();
         all_wait();
     })},
    {"what is heard between arriving and waiting stays known", cluster_of([] {
         all_arrive();
         words()[thread()] = 1;
         __syncwarp();
         all_wait();
         look(words()[31 - thread()]);
     })},
    // What is sent.
    {"sent", cluster_of([] {
         open_for(128);
         send(words() + thread(), 1, 1 - block(), inbox());
         await_inbox(inbox());
         look(words()[31 - thread()]);
         __syncwarp();
         all_started();
         all_wait();
     })},
    {"sent, and not awaited by all", cluster_of([] {
         open_for(128);
         send(words() + thread(), 1, 1 - block(), inbox());
         if (thread() == 0) await_inbox(inbox());
         look(words()[31 - thread()]);
         __syncwarp();
         all_started();
         all_wait();
     })},
    {"sent to where others read", cluster_of([] {
         open_for(128);
         look(words()[thread()]);
         send(words() + thread(), 1, 1 - block(), inbox());
         await_inbox(inbox());
         __syncwarp();
         all_started();
         all_wait();
     })},
    {"copied", cluster_of([] {
         open_for(128);
         words()[thread()] = 1;
         copies_may_follow();
         __syncwarp();
         if (thread() == 0) send_from(words() + 64, words(), 128, 1 - block(), inbox());
         await_inbox(inbox());
         look(words()[64 + thread()]);
         __syncwarp();
         all_arrive();
         all_wait();
     })},
    {"copied without a fence", cluster_of([] {
         open_for(128);
         words()[thread()] = 1;
         __syncwarp();
         if (thread() == 0) send_from(words() + 64, words(), 128, 1 - block(), inbox());
         await_inbox(inbox());
         __syncwarp();
         all_arrive();
         all_wait();
     })},
    {"copied, and overwritten meanwhile", cluster_of([] {
         open_for(128);
         words()[thread()] = 1;
         copies_may_follow();
         __syncwarp();
         if (thread() == 0) send_from(words() + 64, words(), 128, 1 - block(), inbox());
         words()[thread()] = 2;
         await_inbox(inbox());
         __syncwarp();
         all_arrive();
         all_wait();
     })},
    // Blocks of a launch, one after the other.
    {"blocks beside each other", {2, 32, false, [] { global[block() * 32 + thread()] = 1; }}},
    {"blocks over each other", {2, 32, false, [] { global[block() * 31 + thread()] = 1; }}},
    {"a block reads what another writes",
     {2, 32, false,
      [] {
          if (block() == 0) global[thread()] = 1;
          else look(global[thread()]);
      }}},
    {"blocks that add", {2, 32, false, [] { atomicAdd(global, 1); }}},
};
}   // namespace

extern "C" const char* race(const char* name, unsigned seed) {
    const Case& it = CASES.at(name);
    // One array inside another, too.
    races::watch({{global, sizeof global}, {global + 8, 16}});
    const int at_once = it.is_cluster ? it.blocks : 1;
    for (int i = 0; i < it.blocks; i += at_once) {
        copies.clear();
        const char* problem = emulator::run(i, at_once, it.threads, 4096, seed + i, it.kernel);
        if (*problem) return problem;
    }
    return "";
}

// All threads write one number, in an array that an earlier launch had found unfinished.
extern "C" const char* race_in_what_was_expected(unsigned seed) {
    emulator::expect(global, sizeof global);
    emulator::expect(nullptr, 0);
    return emulator::run(0, 1, 64, 4096, seed, [] { global[0] = thread(); });
}
