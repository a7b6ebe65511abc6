"""Triton and CUDA kernels with thin launchers, below the ops. Tensors and numbers in; no state."""
