// kernels/prefill/queries.cu compiled for the CPU.
#include "prompt_twin.h"

#include "queries.cu"

LAUNCH(CASE("queries_kernel", queries_kernel, Queries))
