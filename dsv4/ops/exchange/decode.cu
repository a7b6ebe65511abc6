// Decode step: the gather of the logits of several ranks. exchange.cuh says why it is safe.
#include "exchange.cuh"

constexpr int GATHER_THREADS = 256;

struct Gather {
    Peers peers;
    const float* share;   // [rows][count], this rank's logits
    float* logits;        // [rows][size][count]
    int64_t first_place;
    int rows, count, blocks;
    uint32_t tag;
};

__device__ __forceinline__ void gather(const Gather& p, int block, int threads) {
    launch_dependents();
    wait_for_prerequisites();
    const int size = p.peers.size;
    const int64_t total = (int64_t)p.rows * p.count, step = (int64_t)p.blocks * threads,
                  start = (int64_t)block * threads + threadIdx.x;
    for (int64_t i = start; i < total; i += step) {
        const float v = __ldcg(p.share + i);
        for (int to = 0; to < size; ++to)
            if (to != p.peers.rank) push(p.peers.inbox[to] + p.first_place + i, v, p.tag);
        p.logits[(i / p.count * size + p.peers.rank) * p.count + i % p.count] = v;
    }
    for (int64_t i = start; i < total * (size - 1); i += step) {
        const int other = (int)(i / total), sender = other + (other >= p.peers.rank);
        const int64_t at = i % total;
        uint64_t* own = p.peers.own + sender * p.peers.places + p.first_place + at;
        p.logits[(at / p.count * size + sender) * p.count + at % p.count] = take(get_packet(own), own, p.tag,
                                                                                 p.peers, sender);
    }
}

#ifdef __CUDACC__
// Two blocks on a multiprocessor: decode.py launches no more.
__global__ void __launch_bounds__(GATHER_THREADS, 2) gather_kernel(const __grid_constant__ Gather p) {
    gather(p, blockIdx.x, GATHER_THREADS);
}
#endif
