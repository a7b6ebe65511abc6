"""Rewrites a checkpoint in another number format, tensor by tensor. `run.py` is the way in."""
