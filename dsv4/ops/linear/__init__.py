"""Backends of the op `linear`; `ref.py` is the contract."""
