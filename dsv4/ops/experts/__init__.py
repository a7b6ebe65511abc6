"""Backends of the op `experts`; `ref.py` is the contract."""
