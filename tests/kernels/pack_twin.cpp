// ops/linear/prefill_pack.cu compiled for the CPU.
#include "prompt_twin.h"

// Its arrays have names.
#undef __shared__
#define __shared__ static thread_local
#include "linear/prefill_pack.cu"

LAUNCH(CASE("pack_kernel<0>", pack_kernel<0>, Packing) CASE("pack_kernel<1>", pack_kernel<1>, Packing)
           CASE("pack_kernel<2>", pack_kernel<2>, Packing) CASE("pack_8_kernel", pack_8_kernel, Packing)
               CASE("gather_8_kernel", gather_8_kernel, Gathering) CASE("sort_kernel", sort_kernel, Sorting))
