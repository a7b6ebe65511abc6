// What a kernel does first that may start while the one before it still runs (build.py launches it so).
#pragma once
#include "types.cuh"

__device__ __forceinline__ void let_next_start() { asm volatile("griddepcontrol.launch_dependents;"); }
// What earlier kernels wrote is there after this. Every kernel of a step calls it, so that "earlier" means all. What may
// be read before: numbers.py.
__device__ __forceinline__ void wait_for_earlier() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
