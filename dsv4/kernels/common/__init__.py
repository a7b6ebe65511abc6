"""What kernels of decode steps and of prompts stand on: building, launching, tiles, numbers."""
