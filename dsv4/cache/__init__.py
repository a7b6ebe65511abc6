"""Per-sequence state: window rings, compressor tails, pages of entries. Knows nothing of weights."""
