"""Backends of the op `compress`; `ref.py` is the contract."""
