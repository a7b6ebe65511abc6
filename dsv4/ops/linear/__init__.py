"""The room of the op `linear`; `cpu.py` is the contract."""
