// ops/mhc/decode_open.cu and exchange/decode.cu compiled for the CPU: all blocks of all ranks at once, in a
// shuffled order, some warps far behind. A rank's launches follow one another; ranks have nothing in common
// but their inboxes.
#include "emulator.h"

#include <map>
#include <string>

struct __nv_bfloat16 {
    uint16_t bits;
};
struct __nv_bfloat162 {
    uint32_t bits;
};
inline float __bfloat162float(__nv_bfloat16 v) { return __uint_as_float((uint32_t)v.bits << 16); }
inline uint32_t to_bfloat16(float v) {
    const uint32_t bits = __float_as_uint(v);
    return v != v ? 0x7FFFu : (bits + 0x7FFFu + (bits >> 16 & 1)) >> 16;
}
inline __nv_bfloat162 __floats2bfloat162_rn(float low, float high) {
    return {to_bfloat16(high) << 16 | to_bfloat16(low)};
}
inline void check_has_waited() {
    if (!emulator::now->has_waited) emulator::fail("something but a weight is touched before the PDL wait");
}
// Others go on between any two accesses to an inbox.
inline void put_packet(uint64_t* to, uint64_t packet) {
    check_has_waited();
    emulator::yield(false);
    races::touch(to, sizeof packet, races::ATOMIC, __builtin_return_address(0));
    const races::Aside aside;
    *to = packet;
}
inline uint64_t word_at(const uint64_t* from) {
    const races::Aside aside;
    return *from;
}
inline uint64_t get_packet(const uint64_t* from) {
    check_has_waited();
    static std::map<emulator::Thread*, std::pair<const uint64_t*, uint64_t>> seen;
    races::touch(from, sizeof *from, races::ATOMIC, __builtin_return_address(0));
    const std::pair<const uint64_t*, uint64_t> found = {from, word_at(from)};
    auto& last = seen[emulator::now];
    const bool is_same = last == found;
    last = found;
    emulator::yield(is_same);
    return found.second;
}
inline int get_ended(const int* from) { return *from; }
inline void put_ended(int* to, int v) { *to = v; }
inline int64_t nanoseconds() { return 0; }
// Where a launch may read and write; empty: anywhere.
struct Array {
    const void* begin;
    int64_t bytes;
};
inline std::vector<Array> weights, inputs, outputs;
template <typename T> bool is_within(const std::vector<Array>& arrays, const T* p, int count = 1) {
    if (&arrays != &weights) check_has_waited();
    bool is_found = arrays.empty();
    for (const Array& a : arrays)
        is_found |= (const char*)p >= (const char*)a.begin &&
                    (const char*)(p + count) <= (const char*)a.begin + a.bytes;
    if (!is_found) emulator::fail("an address outside of all arrays");
    return is_found;
}
inline float load_weight(const float* from, bool is_there) {
    return is_there && is_within(weights, from) ? *from : 0.f;
}
template <typename T> T load(const T* from, bool is_there) {
    return is_there && is_within(inputs, from) ? *from : T();
}
inline void load_four(const float* from, float (&to)[4]) {
    if (is_within(inputs, from, 4)) std::copy(from, from + 4, to);
}
inline void store(float* to, float v, bool is_there) {
    if (is_there && is_within(outputs, to)) *to = v;
}
inline void store(__nv_bfloat16* to, float v, bool is_there) {
    if (is_there && is_within(outputs, to)) to->bits = (uint16_t)(__float_as_uint(v) >> 16);
}
#include "exchange/decode.cu"
#include "mhc/decode_open.cu"

namespace {
// A step's inputs and outputs, as the tests have them.
struct Step {
    int rows, programs, d, vocab, parts, mixes, own, is_wide_table;
    const int* chosen;
    const int64_t* ids;
    const void* table;   // [ranks][vocab][d]
    const float *fn, *gate, *comb;
};

template <typename Act>
Open<Act> opening(const Step& g, const Peers& peers, Act* streams, float* partial, int number, int turns) {
    const int chunks = (g.d + CHUNK - 1) / CHUNK;
    Open<Act> p = {};
    p.peers = peers;
    p.chosen = g.chosen;
    p.first_own = peers.rank * g.own;
    p.own = g.own;
    p.ids = g.ids;
    p.table = (const char*)g.table + (int64_t)peers.rank * g.vocab * g.d * (g.is_wide_table ? 4 : 2);
    p.is_wide = g.is_wide_table;
    p.vocab = g.vocab;
    p.gate = g.gate;
    p.comb = g.comb;
    p.streams = streams;
    p.fn = g.fn;
    p.partial = partial;
    p.first_place = (int64_t)(number % turns) * g.rows * g.d;
    p.rows = g.rows;
    p.programs = g.programs;
    p.chunks = chunks;
    p.d = g.d;
    p.parts = g.parts;
    p.mixes = g.mixes;
    p.tag = g.rows << 16 | number + 1;
    return p;
}

// By itself: the step's tokens (y null), or an output.
template <typename Act, typename Y>
const char* alone(const Step& g, const void* y, void* streams, float* partial, unsigned seed) {
    const int chunks = (g.d + CHUNK - 1) / CHUNK;
    races::watch({{streams, g.rows * STREAMS * g.d * sizeof(Act)},
                  {partial, g.rows * chunks * WIDTH * sizeof(float)}});
    return emulator::run(0, chunks * g.programs, THREADS, sizeof(Shared), seed, [&] {
        Peers peers = {};
        peers.size = 1;
        Open<Act> p = opening<Act>(g, peers, static_cast<Act*>(streams), partial, 0, 1);
        p.y = y;
        if (y) open<Act, Y, false>(p, blockIdx.x, *static_cast<Shared*>(shared_memory()));
        else open<Act, Token, false>(p, blockIdx.x, *static_cast<Shared*>(shared_memory()));
    });
}

// One launch of every rank, as its launcher asks for it.
template <typename Act, typename Y, bool IS_SHARED>
const char* launch(int count, const void* const* params, int blocks, unsigned seed) {
    const std::vector<Array> before[3] = {weights, inputs, outputs};
    for (int i = 0; i < count; ++i) {
        const Open<Act>& p = *static_cast<const Open<Act>*>(params[i]);
        const int64_t d = p.d, rows = p.rows;
        weights.push_back({p.fn, p.mixes * STREAMS * d * 4});
        const Array streams = {p.streams, rows * STREAMS * d * (int64_t)sizeof(Act)},
                    table = {p.table, p.vocab * d * (p.is_wide ? 4 : 2)};
        if (Row<Act, Y>::BEGINS) inputs.push_back(table);
        else
            inputs.insert(inputs.end(), {streams,
                                         {p.y, rows * p.parts * d * (int64_t)sizeof(Y)},
                                         {p.gate, rows * 16},
                                         {p.comb, rows * 64}});
        outputs.insert(outputs.end(), {streams, {p.partial, rows * p.chunks * WIDTH * 4}});
    }
    std::vector<races::Array> watched;
    for (const Array& it : outputs) watched.push_back({it.begin, (size_t)it.bytes});
    races::watch(watched);
    const char* problem = emulator::run(0, count * blocks, THREADS, sizeof(Shared), seed, [&] {
        const int rank = blockIdx.x / blocks;
        open<Act, Y, IS_SHARED>(*static_cast<const Open<Act>*>(params[rank]), blockIdx.x % blocks,
                                *static_cast<Shared*>(shared_memory()));
        const emulator::Thread& thread = *emulator::now;
        if (!thread.has_waited || !thread.has_triggered || thread.triggers_late != Row<Act, Y>::BEGINS)
            emulator::fail("a launch waits or triggers otherwise than declared");
    });
    weights = before[0];
    inputs = before[1];
    outputs = before[2];
    return problem;
}
const char* launch_gather(int count, const void* const* params, int blocks, unsigned seed) {
    std::vector<races::Array> watched;
    for (int i = 0; i < count; ++i) {
        const Gather& p = *static_cast<const Gather*>(params[i]);
        watched.push_back({p.logits, (size_t)p.rows * p.count * p.peers.size * sizeof(float)});
        watched.push_back({p.peers.own, (size_t)p.peers.places * p.peers.size * sizeof(uint64_t)});
    }
    races::watch(watched);
    return emulator::run(0, count * blocks, GATHER_THREADS, 0, seed, [&] {
        gather(*static_cast<const Gather*>(params[blockIdx.x / blocks]), blockIdx.x % blocks, GATHER_THREADS);
    });
}
typedef __nv_bfloat16 Bf16;
const std::map<std::string, const char* (*)(int, const void* const*, int, unsigned)> KERNELS = {
    {"open_kernel<float, true, false>", launch<float, float, false>},
    {"open_kernel<float, true, true>", launch<float, float, true>},
    {"open_kernel<__nv_bfloat16, false, false>", launch<Bf16, Bf16, false>},
    {"open_kernel<__nv_bfloat16, true, false>", launch<Bf16, float, false>},
    {"open_kernel<__nv_bfloat16, true, true>", launch<Bf16, float, true>},
    {"embed_kernel<float, false>", launch<float, Token, false>},
    {"embed_kernel<float, true>", launch<float, Token, true>},
    {"embed_kernel<__nv_bfloat16, false>", launch<Bf16, Token, false>},
    {"embed_kernel<__nv_bfloat16, true>", launch<Bf16, Token, true>},
    {"gather_kernel", launch_gather},
};
}   // namespace

extern "C" {
// `params`: of each rank, the structure that mhc/decode.py passes.
const char* launched(const char* kernel, int count, const void* const* params, int blocks, unsigned seed) {
    return KERNELS.at(kernel)(count, params, blocks, seed);
}

// streams [rows][4][d] in BF16 or float32, y [rows][parts][d] likewise.
const char* open_alone(int is_wide, int is_wide_y, int rows, int programs, int d, int vocab, int parts,
                       int mixes, int own, int is_wide_table, const int* chosen, const int64_t* ids,
                       const void* table, const float* fn, const float* gate, const float* comb,
                       const void* y, void* streams, float* partial, unsigned seed) {
    const Step g = {rows,          programs, d,   vocab, parts, mixes, own,
                    is_wide_table, chosen,   ids, table, fn,    gate,  comb};
    return is_wide     ? alone<float, float>(g, y, streams, partial, seed)
           : is_wide_y ? alone<__nv_bfloat16, float>(g, y, streams, partial, seed)
                       : alone<__nv_bfloat16, __nv_bfloat16>(g, y, streams, partial, seed);
}

// `steps` of tokens, two sums and one gather on each rank; without `ids`, of sums and gathers. y
// [ranks][steps * 2][rows][parts][d], of which rank r counts the parts whose `chosen` [rows][parts - 1] are
// among its `own` experts, and the last; share [ranks][steps][rows][vocab], streams [ranks][rows][4][d],
// logits [ranks][steps][rows][ranks * vocab]; `turns`: places that sums take in turn.
const char* ranks(int size, int rows, int d, int vocab, int steps, int turns, int parts, int own,
                  const int* chosen, const int64_t* ids, const float* table, const float* y, const float* fn,
                  const float* gate, const float* comb, float* streams, float* partial, const float* share,
                  float* logits, uint64_t* inboxes, int* ended, unsigned seed) {
    const Step g = {rows, min(rows, 2), d, vocab, parts, MIXES, own, 1, chosen, ids, table, fn, gate, comb};
    const int chunks = (d + CHUNK - 1) / CHUNK, blocks = chunks * g.programs;
    const int64_t sums = (int64_t)rows * d, places = turns * sums + (int64_t)rows * vocab;
    std::vector<emulator::Barrier> complete(size);
    races::watch({
        {streams, size * 4 * sums * sizeof(float)},
        {partial, (size_t)size * rows * chunks * WIDTH * sizeof(float)},
        {logits, (size_t)size * steps * rows * vocab * size * sizeof(float)},
        {inboxes, size * size * places * sizeof(uint64_t)},
    });
    return emulator::run(0, size * blocks, THREADS, sizeof(Shared), seed, [&] {
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
            emulator::now->has_waited = false;
            emulator::meet(complete[rank], blocks * THREADS);
            if (threadIdx.x == 0) ++emulator::cluster.turn;   // other warps fall behind
        };
        for (int step = 0; step < steps; ++step) {
            for (int number = ids ? 0 : 1; number <= 2; ++number) {
                Open<float> p = opening<float>(g, peers, streams + rank * 4 * sums,
                                               partial + (int64_t)rank * rows * chunks * WIDTH, number,
                                               turns);
                Shared& shared = *static_cast<Shared*>(shared_memory());
                if (number) {
                    p.y = y + ((int64_t)rank * steps * 2 + step * 2 + number - 1) * sums * parts;
                    open<float, float, true>(p, block, shared);
                } else open<float, Token, true>(p, block, shared);
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
            gather(g, block, THREADS);
            next_launch();
        }
    });
}
}
