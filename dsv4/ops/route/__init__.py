"""Backends of the op `route`; `ref.py` is the contract."""
