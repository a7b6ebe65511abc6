// Decode step: how numbers pass between several ranks inside a graph. A rank pushes into the inboxes of the
// others, in their memory (peer pointers), and takes what lies in its own. There is no barrier and no
// counter: a packet is one word of 8 bytes, number and tag, so whoever sees the tag has the number, and the
// taker empties the place.
//
// Atomic. A packet is one aligned 64-bit access, relaxed, at system scope: it is seen whole or not at all.
// Nothing else is published by it, so no fence is needed.
//
// Reuse. An inbox has, for each sender, two places for every number of a sum, used in turn, and one for every
// logit. Let exchange k and a later one j be the next two that use the same place of rank B's inbox for what
// A sends. Between them lies at least one more exchange, m (sums take turns; the logits lie between two
// steps' sums, and sums between two steps' logits). A pushes j after its PDL wait, so its exchange m is
// complete: it took packets of m from B. B pushed those after its own PDL wait, so B's exchange k was
// complete: every packet of k was taken and every place emptied, in B's L2, which all accesses to B's memory
// go through. So no push finds a place in use, and none is lost by an emptying that comes late. That is why a
// rank is never more than one exchange ahead of another, without any counter; and why a graph can be
// replayed: it finds the places as it left them.
//
// Tags. A tag is the exchange's number in its step and the number of rows. Since places are emptied, any tag
// would do; with these, ranks that run different steps wait for each other until their time is up, instead of
// adding what does not belong together.
//
// Progress. A block pushes all that it has before it takes anything, and waits for nothing but pushes. All
// blocks of a launch are resident at once (mhc/decode.py, decode.py), so every push is made. Dependents start
// when all of its blocks have started: they take no room.
//
// Time. A taker that has waited for `limit_ns` writes the sender's number + 1 to `ended`, in pinned host
// memory; the host writes -1 there when it knows that a rank is gone. Whoever waits looks there now and then,
// and goes on with a NaN; the host looks when the step is done, and ends all ranks.
#pragma once
#ifdef __CUDACC__
#include "launch.cuh"
#endif

constexpr int MAX_RANKS = 8;

struct Peers {
    uint64_t* inbox[MAX_RANKS];   // of each rank, from this rank's first place on
    uint64_t* own;                // [size][places], by sender
    int* ended;
    int64_t places, limit_ns;
    int rank, size;
};

#ifdef __CUDACC__
__device__ __forceinline__ void put_packet(uint64_t* to, uint64_t packet) {
    asm volatile("st.relaxed.sys.global.b64 [%0], %1;" ::"l"(to), "l"(packet) : "memory");
}
__device__ __forceinline__ uint64_t get_packet(const uint64_t* from) {
    uint64_t packet;
    asm volatile("ld.relaxed.sys.global.b64 %0, [%1];" : "=l"(packet) : "l"(from) : "memory");
    return packet;
}
__device__ __forceinline__ int get_ended(const int* from) {
    int v;
    asm volatile("ld.relaxed.sys.global.b32 %0, [%1];" : "=r"(v) : "l"(from) : "memory");
    return v;
}
__device__ __forceinline__ void put_ended(int* to, int v) {
    asm volatile("st.relaxed.sys.global.b32 [%0], %1;" ::"l"(to), "r"(v) : "memory");
}
__device__ __forceinline__ int64_t nanoseconds() {
    int64_t now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    return now;
}
#endif

__device__ __forceinline__ void push(uint64_t* to, float v, uint32_t tag) {
    put_packet(to, (uint64_t)tag << 32 | __float_as_uint(v));
}

// Polls until the tag is there, or the time is up.
constexpr int POLLS = 1024;   // between two looks at the clock
__device__ __forceinline__ uint64_t wait_for_packet(const uint64_t* from, uint32_t tag, const Peers& p,
                                                    int sender) {
    const int64_t start = nanoseconds();
    for (;;) {
#pragma unroll 1
        for (int i = 0; i < POLLS; ++i) {
            const uint64_t packet = get_packet(from);
            if ((uint32_t)(packet >> 32) == tag) return packet;
        }
        if (get_ended(p.ended)) break;
        if (nanoseconds() - start > p.limit_ns) {
            put_ended(p.ended, sender + 1);
            break;
        }
    }
    return (uint64_t)tag << 32 | 0x7FC00000u;
}

// The number that `sender` pushed to this place of this rank's inbox; the place is empty again.
__device__ __forceinline__ float take(uint64_t packet, uint64_t* from, uint32_t tag, const Peers& p,
                                      int sender) {
    if ((uint32_t)(packet >> 32) != tag) packet = wait_for_packet(from, tag, p, sender);
    put_packet(from, 0);
    return __uint_as_float((uint32_t)packet);
}

// Of all ranks' numbers: neighbours first, the same on every rank.
__device__ __forceinline__ float sum_ranks(const float* numbers, int stride, int size) {
    float v[MAX_RANKS];
#pragma unroll
    for (int i = 0; i < MAX_RANKS; ++i) v[i] = i < size ? numbers[i * stride] : 0.f;
    const float low = (v[0] + v[1]) + (v[2] + v[3]);
    return size <= 4 ? (size <= 2 ? v[0] + v[1] : low) : low + ((v[4] + v[5]) + (v[6] + v[7]));
}
