"""Checkpoint files: read, check, detect formats, load, write. Knows every published layout; knows no request."""
