"""CUDA C++ and Triton kernels with thin launchers: pointers and sizes, no model, no cache, no policy."""
