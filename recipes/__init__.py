"""Reproducible recipes; each imports dsv4 and is never imported by it."""
