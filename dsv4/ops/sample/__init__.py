"""Backends of the op `sample`; `ref.py` is the contract."""
