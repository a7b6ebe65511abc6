"""Checkpoint files: read, check, detect formats, load, write. Knows every layout; knows no request."""
