// Decode step: the row of a pool that holds an entry, of pages of a power of two entries.
#pragma once

template <typename Row> __device__ __forceinline__ Row row_of_entry(Row page, int entry, int page_bits) {
    return (page << page_bits) + (entry & ((1 << page_bits) - 1));
}
