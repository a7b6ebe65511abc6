"""Backends of the op `qkv`; `ref.py` is the contract."""
