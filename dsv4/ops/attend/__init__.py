"""Backends of the op `attend`; `ref.py` is the contract."""
