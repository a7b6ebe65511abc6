"""Per-sequence state: window rings, compressor tails, pages of compressed entries. Knows nothing of weights."""
