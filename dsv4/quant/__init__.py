"""Number formats: what the bytes of a quantised tensor mean. Knows nothing of models or files."""
