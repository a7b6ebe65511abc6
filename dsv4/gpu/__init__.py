"""The machine: builds and launches kernels, and what their sources share. No model, no cache, no policy."""
