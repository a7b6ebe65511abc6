"""The room of the op `index`; `cpu.py` is the contract."""
