"""The room of the op `experts`; `cpu.py` is the contract."""
