"""The room of the op `attention`; `cpu.py` is the contract."""
