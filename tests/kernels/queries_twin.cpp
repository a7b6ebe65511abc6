// ops/index/prefill_queries.cu compiled for the CPU.
#include "prompt_twin.h"

#include "index/prefill_queries.cu"

LAUNCH(CASE("queries_kernel", queries_kernel, Queries))
