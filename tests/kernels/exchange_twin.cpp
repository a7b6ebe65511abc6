// kernels/decode/exchange.cu compiled for the CPU: all blocks of all ranks at once, in a shuffled order, some warps far behind. A
// rank's launches follow one another; ranks have nothing in common but their inboxes.
#include "emulator.h"

#include <map>

struct __nv_bfloat16 {
    uint16_t bits;
};
inline float __bfloat162float(__nv_bfloat16) { return 0.f; }
inline __nv_bfloat16 __float2bfloat16_rn(float) { return {}; }
// Others go on between any two accesses to an inbox.
inline void put_packet(uint64_t* to, uint64_t packet) {
    emulator::yield(false);
    *to = packet;
}
inline uint64_t get_packet(const uint64_t* from) {
    static std::map<emulator::Thread*, std::pair<const uint64_t*, uint64_t>> seen;
    const std::pair<const uint64_t*, uint64_t> found = {from, *from};
    auto& last = seen[emulator::now];
    const bool is_same = last == found;
    last = found;
    emulator::yield(is_same);
    return found.second;
}
inline int get_ended(const int* from) { return *from; }
inline void put_ended(int* to, int v) { *to = v; }
inline int64_t nanoseconds() { return 0; }
#include "exchange.cu"

extern "C" {
// `steps` of two sums and one gather on each rank. y [ranks][steps * 2][rows][parts][d], of which rank r counts the parts whose
// `chosen` [rows][parts - 1] are among its `own` experts, and the last; share [ranks][steps][rows][vocab], streams
// [ranks][rows][4][d], logits [ranks][steps][rows][ranks * vocab]; `turns`: places that sums take in turn.
const char* ranks(int size, int rows, int d, int vocab, int steps, int turns, int parts, int own, const int* chosen, const float* y, const float* fn, const float* gate,
                  const float* comb, float* streams, float* partial, const float* share, float* logits, uint64_t* inboxes, int* ended,
                  unsigned seed) {
    const int chunks = (d + CHUNK - 1) / CHUNK, programs = min(rows, 2), blocks = chunks * programs;
    const int64_t sums = (int64_t)rows * d, places = turns * sums + (int64_t)rows * vocab;
    std::vector<emulator::Barrier> complete(size);
    return emulator::run(0, size * blocks, OPEN_THREADS, sizeof(Shared), seed, [&] {
        const int rank = blockIdx.x / blocks, block = blockIdx.x % blocks;
        Peers peers = {};
        for (int i = 0; i < size; ++i) peers.inbox[i] = inboxes + (i * size + rank) * places;
        peers.own = inboxes + rank * size * places;
        peers.ended = ended + rank;
        peers.places = places;
        peers.rank = rank;
        peers.size = size;
        // The PDL wait of the next launch.
        const auto next_launch = [&] {
            emulator::meet(complete[rank], blocks * OPEN_THREADS);
            if (threadIdx.x == 0) ++emulator::cluster.turn;   // other warps fall behind
        };
        for (int step = 0; step < steps; ++step) {
            for (int number = 1; number <= 2; ++number) {
                Open<float> p = {};
                p.peers = peers;
                p.y = y + ((int64_t)rank * steps * 2 + step * 2 + number - 1) * sums * parts;
                p.chosen = chosen;
                p.first_own = rank * own;
                p.own = own;
                p.gate = gate;
                p.comb = comb;
                p.streams = streams + rank * 4 * sums;
                p.fn = fn;
                p.partial = partial + (int64_t)rank * rows * chunks * WIDTH;
                p.first_place = number % turns * sums;
                p.rows = rows;
                p.programs = programs;
                p.chunks = chunks;
                p.d = d;
                p.parts = parts;
                p.mixes = MIXES;
                p.tag = rows << 16 | number + 1;
                open(p, block, *static_cast<Shared*>(shared_memory()));
                next_launch();
            }
            Gather g = {};
            g.peers = peers;
            g.share = share + ((int64_t)rank * steps + step) * rows * vocab;
            g.logits = logits + ((int64_t)rank * steps + step) * rows * vocab * size;
            g.first_place = turns * sums;
            g.rows = rows;
            g.count = vocab;
            g.blocks = blocks;
            g.tag = rows << 16 | 4;
            gather(g, block, OPEN_THREADS);
            next_launch();
        }
    });
}
}
