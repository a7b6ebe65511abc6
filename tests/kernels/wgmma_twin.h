// gpu/wgmma.cuh, what it takes from the GPU, on the CPU. A product is made when it is waited for: until then
// its sums are NaN, and who changes an operand too early changes it. Races.h knows its reads of shared memory
// by the warp's mailbox, which a wait collects.
#pragma once
#include "bulk_twin.h"

#include "wgmma.cuh"

namespace tensor {
// An operand in shared memory, by its descriptor. `is_transposed`: neighbours are numbers of one k (16 bits
// each).
struct Matrix {
    uint64_t bits;
    bool is_transposed = false;
    // Of number `i` across, and a byte along K; both its chunk of 16 bytes, and where in it.
    int place(int i, int byte) const {
        const int start = (int)(bits & 0x3FFF) << 4, leading = (int)(bits >> 16 & 0x3FFF) << 4,
                  stride = (int)(bits >> 32 & 0x3FFF) << 4;
        if (bits >> 62 == 0) return start + byte / 16 * leading + i / 8 * stride + i % 8 * 16 + byte % 16;
        const int k = byte / 2;
        const int at = is_transposed ? start + i / 64 * leading + k / 8 * stride + k % 8 * 128 + i % 64 * 2
                                     : start + i / 8 * stride + i % 8 * 128 + byte;
        return at ^ (at >> 7 & 7) << 4;
    }
    bool is_aligned() const {
        return bits >> 62 == 0 || (bits >> 3 & 7) == 0;
    }   // of eight rows that are swizzled, the first
};
struct Registers {   // a lane's
    float* d;
    const uint32_t* a;
    uint64_t b;
};
struct Product {
    Operands types;
    int columns;
    bool adds, has_matrix;
    Matrix a, b;
    Registers of[32];
    uint32_t group;
    std::vector<float> before;   // what it adds to, unless a product before it makes that
};
struct Warp {
    std::vector<Product> products;
    std::vector<uint64_t> all;   // what it was asked for
    uint32_t groups = 0;         // committed
    bool is_fenced = false;
};
inline std::map<int, Warp> warps;
constexpr int ROWS = 16, MAX_COLUMNS = 256, MAX_DEPTH = 32;

inline Warp& mine() { return warps[emulator::now->index / 32]; }
inline bool is_wide(Operands types) { return types == F16_F16 || types == BF16_BF16; }   // 16 bits a number
inline const float* values_of(Operands types, bool is_a) {
    static const std::vector<std::vector<float>> all = [] {
        std::vector<std::vector<float>> made(4, std::vector<float>(1 << 16));
        for (int i = 0; i < 1 << 16; ++i) {
            made[0][i] = f16_value((uint16_t)i);
            made[1][i] = bf16_value((uint16_t)i);
            made[2][i] = e4m3_value((uint8_t)i);
            made[3][i] = f16_value((uint16_t)(i << 8));   // E5M2
        }
        return made;
    }();
    return all[types == E5M2_E4M3 ? (is_a ? 3 : 2) : types].data();
}
// What a warp reads of a matrix: its chunks of 16 bytes.
inline void tell_reads(const Matrix& matrix, int first, int count) {
    const emulator::Mailbox& box = emulator::mailbox(&mine());
    const auto touch = [&](int i, int byte) {
        char* at = bulk::place_of(bulk::BASE + matrix.place(i, byte), 16);
        if (!at) return;
        const races::Copy reads = {box.index, box.clock + 1, true};
        races::touch(at, 16, races::READ, __builtin_return_address(0), &reads);
    };
    if (!matrix.is_aligned()) emulator::fail("a swizzled matrix that does not begin with eight rows");
    for (int i = first; i < first + count; i += matrix.is_transposed ? 8 : 1)
        for (int byte = 0; byte < 32; byte += matrix.is_transposed ? 2 : 16) touch(i, byte);
}
inline void ask(Operands types, int columns, bool adds, bool has_matrix, Matrix a, Matrix b,
                const uint64_t* lanes) {
    Warp& warp = mine();
    Product made = {types, columns, adds, has_matrix, a, b};
    for (int i = 0; i < 32; ++i) made.of[i] = *(const Registers*)lanes[i];
    for (const Registers& its : made.of)
        if (its.b != b.bits) emulator::fail("lanes of a warp multiply with different matrices");
    if (!warp.is_fenced) emulator::fail("registers of a product are not ordered before it");
    tell_reads(b, 0, columns);
    if (has_matrix) tell_reads(a, emulator::now->index / 32 % 4 * ROWS, ROWS);
    const races::Aside aside;
    made.group = warp.groups + 1;
    bool is_pending = false;
    for (const Product& other : warp.products) is_pending |= other.of[0].d == made.of[0].d;
    for (const Registers& its : made.of)
        for (int i = 0; i < columns / 2; ++i) {
            if (!is_pending) made.before.push_back(its.d[i]);
            its.d[i] = NAN;
        }
    for (const uint64_t it : {b.bits, has_matrix ? a.bits : 0, (uint64_t)columns << 1 | adds})
        warp.all.push_back(it);
    warp.products.push_back(std::move(made));
}
// [16 rows][columns] += A B, each sum of a product in float64, rounded once.
__attribute__((optimize("O3"), no_sanitize("thread"))) inline void multiply(const Product& p, int first_row,
                                                                            float* sums) {
    static double a[MAX_DEPTH][ROWS], b[MAX_DEPTH][MAX_COLUMNS], row[MAX_COLUMNS];
    const float *a_values = values_of(p.types, true), *b_values = values_of(p.types, false);
    const bool wide = is_wide(p.types);
    const int depth = wide ? 16 : 32, bytes = wide ? 2 : 1, columns = p.columns;
    for (int k = 0; k < depth; ++k) {
        for (int i = 0; i < ROWS; ++i) {
            uint32_t code;
            if (p.has_matrix) code = *(const uint16_t*)(shared + p.a.place(first_row + i, k * bytes));
            else if (wide) code = p.of[i % 8 * 4 + k % 8 / 2].a[i / 8 + k / 8 * 2] >> k % 2 * 16 & 0xFFFF;
            else code = p.of[i % 8 * 4 + k % 16 / 4].a[i / 8 + k / 16 * 2] >> k % 4 * 8 & 0xFF;
            a[k][i] = a_values[code];
        }
        for (int n = 0; n < columns; ++n) {
            const char* at = shared + p.b.place(n, k * bytes);
            b[k][n] = b_values[wide ? *(const uint16_t*)at : *(const uint8_t*)at];
        }
    }
    for (int i = 0; i < ROWS; ++i) {
        for (int n = 0; n < columns; ++n) row[n] = p.adds ? sums[i * columns + n] : 0.;
        for (int k = 0; k < depth; ++k)
            for (int n = 0; n < columns; ++n) row[n] += a[k][i] * b[k][n];
        for (int n = 0; n < columns; ++n) sums[i * columns + n] = (float)row[n];
    }
}
// Where a lane has [row][column] of the sums.
inline int lane_of(int i, int n) { return i % 8 * 4 + n % 8 / 2; }
inline int number_of(int i, int n) { return n / 8 * 4 + i / 8 * 2 + n % 2; }
// All but the last groups.
__attribute__((no_sanitize("thread"))) inline void finish(uint32_t pending) {
    Warp& warp = mine();
    const races::Aside aside;
    static std::map<const float*, std::vector<float>> open;   // sums that later products add to
    static std::vector<Product> left;
    left.clear();
    for (Product& product : warp.products) {
        if (product.group + pending > warp.groups) {
            left.push_back(std::move(product));
            continue;
        }
        std::vector<float>& sums = open[product.of[0].d];
        if (!product.before.empty()) {
            sums.resize(ROWS * product.columns);
            for (int i = 0; i < ROWS; ++i)
                for (int n = 0; n < product.columns; ++n)
                    sums[i * product.columns + n] =
                        product.before[lane_of(i, n) * (product.columns / 2) + number_of(i, n)];
        }
        multiply(product, emulator::now->index / 32 % 4 * ROWS, sums.data());
        const Product* next = nullptr;
        for (Product* it = &product + 1; it < warp.products.data() + warp.products.size() && !next; ++it)
            if (it->of[0].d == product.of[0].d) next = it;
        if (next) {
            if (next->group + pending > warp.groups) {   // it begins with these
                Product& later = const_cast<Product&>(*next);
                later.before.assign(32 * (product.columns / 2), 0.f);
                for (int i = 0; i < ROWS; ++i)
                    for (int n = 0; n < product.columns; ++n)
                        later.before[lane_of(i, n) * (product.columns / 2) + number_of(i, n)] =
                            sums[i * product.columns + n];
            }
            continue;
        }
        for (int i = 0; i < ROWS; ++i)
            for (int n = 0; n < product.columns; ++n)
                product.of[lane_of(i, n)].d[number_of(i, n)] = sums[i * product.columns + n];
    }
    open.clear();
    warp.products.swap(left);
}
inline void start() { warps.clear(); }
inline const char* left_behind() {
    for (const auto& [number, warp] : warps) {
        if (!warp.products.empty()) return "a block leaves while products are on their way";
        if (warp.all != warps[number / 4 * 4].all) return "warps of a warpgroup multiply different things";
    }
    return "";
}
template <int N>
void multiply(Operands types, float (&d)[N], const uint32_t* registers, Matrix a, Matrix b, bool adds) {
    Registers lane = {d, registers, b.bits};
    emulator::together("wgmma", &lane,
                       [&](const uint64_t* all) { ask(types, 2 * N, adds, !registers, a, b, all); });
}
}   // namespace tensor

inline void wgmma_fence() {
    emulator::together("wgmma_fence", 0, [](const uint64_t*) { tensor::mine().is_fenced = true; });
}
inline void wgmma_commit() {
    emulator::together("wgmma_commit", 0, [](const uint64_t*) {
        emulator::mailbox(&tensor::mine()).clock = ++tensor::mine().groups;
    });
}
template <int PENDING> void wgmma_wait() {
    emulator::together("wgmma_wait", 0, [](const uint64_t*) {
        tensor::mine().is_fenced = false;
        tensor::finish(PENDING);
    });
    const uint32_t groups = tensor::mine().groups;
    races::hear(emulator::now->observer, emulator::mailbox(&tensor::mine()).index,
                groups - min(groups, (uint32_t)PENDING));
}
template <Operands T, int N> void wgmma(float (&d)[N], const uint32_t (&a)[4], uint64_t b, int adds) {
    tensor::multiply(T, d, a, {}, {b}, adds);
}
