"""Backends of the op `mhc`; `ref.py` is the contract."""
