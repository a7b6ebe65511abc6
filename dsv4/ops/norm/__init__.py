"""Backends of the op `norm`; `ref.py` is the contract."""
