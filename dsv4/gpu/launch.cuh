// Decode step and prompts: programmatic dependent launch (PDL): with `overlap` (build.py) a kernel may start
// while the one before it still runs.
#pragma once
#ifdef __CUDACC__
#include "types.cuh"

// The next kernel may start when every block of this one has come here, or has exited.
__device__ __forceinline__ void launch_dependents() { asm volatile("griddepcontrol.launch_dependents;"); }
// After this the launches before this one are complete and what they wrote is visible. Every kernel of a step
// executes it. What each reads before is declared with its launcher (pdl.py) and read from L2 if a step
// writes it: until the wait, a line of an earlier kernel may lie in L1.
__device__ __forceinline__ void wait_for_prerequisites() {
    asm volatile("griddepcontrol.wait;" ::: "memory");
}
#endif
