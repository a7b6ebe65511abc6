"""What DeepSeek-V4 computes: whole sequences in plain torch. No cache, no batch, no kernels, no speed."""
