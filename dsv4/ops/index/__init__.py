"""Backends of the op `index`; `ref.py` is the contract."""
