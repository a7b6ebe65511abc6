// Decode step: how blocks share the products of a routed batch. How many tasks there are is known on the GPU
// alone.
#pragma once

struct Share {     // of a segment: its turns, in which a block multiplies `units` of its units, at this cost
                   // each
    int repeats;   // groups of rows; 0: tasks
    int turns, units, cost;
};

// A block's part of what all segments cost together, from `at` to `end`.
struct Part {
    int at = 0, end = 0;
    __device__ __forceinline__ Part() {}
    __device__ __forceinline__ Part(const Share* shares, int count, int tasks, int block, int blocks) {
        int total = 0;
        for (int i = 0; i < count; ++i)
            total += (shares[i].repeats ? shares[i].repeats : tasks) * shares[i].turns * shares[i].cost;
        const int each = (total + blocks - 1) / blocks;
        at = each * block;
        end = min(at + each, total);
    }
    // Segment, first unit, units (of the last turn: maybe more than there are), repeat; segment -1: nothing
    // is left. A turn is the block's in whose part it begins.
    __device__ __forceinline__ int4 next(const Share* shares, int count, int tasks) {
        int base = 0;
        for (int i = 0; i < count; ++i) {
            const Share s = shares[i];
            const int all = (s.repeats ? s.repeats : tasks) * s.turns;
            const int first = max(at - base + s.cost - 1, 0) / s.cost,
                      last = min(max(end - base + s.cost - 1, 0) / s.cost, all);
            if (first < last) {
                const int repeat = first / s.turns, skipped = repeat * s.turns,
                          upto = min(last - skipped, s.turns);
                at = base + (skipped + upto) * s.cost;
                return make_int4(i, (first - skipped) * s.units, (upto - (first - skipped)) * s.units,
                                 repeat);
            }
            base += all * s.cost;
        }
        return make_int4(-1, 0, 0, 0);
    }
};
