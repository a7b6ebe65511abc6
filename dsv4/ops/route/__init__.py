"""The room of the op `route`; `cpu.py` is the contract."""
