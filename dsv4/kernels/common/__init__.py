"""Decode step and prompts: what their kernels stand on. Building, launching, tiles, numbers."""
